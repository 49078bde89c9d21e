"""What the null backend answers: yes to every call whose result the schema describes."""

from __future__ import annotations

from te_hal.schema.block_scales import BLOCK_MODES, MTFP8_MODES
from te_hal.schema.formats import ScalingMode
from te_hal.schema.gemm import pairing
from te_hal.schema.support import SUPPORTED, Call, Code, Support


def supports(call: Call) -> Support:
    """No to scaling modes whose scales have no shape in the schema yet, and to products that it does not have."""
    mode = ScalingMode(call.flags.get("mode", ScalingMode.TENSOR))
    if mode is not ScalingMode.TENSOR and mode not in BLOCK_MODES | MTFP8_MODES:
        return Support.no(Code.MODE, f"makes no storages of scaling mode {mode.value!r}, which is not built yet")
    return pairing(call) if call.op == "gemm" else SUPPORTED
