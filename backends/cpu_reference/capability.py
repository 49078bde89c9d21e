"""What cpu_reference can do, asked before a kernel is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.block_scales import BLOCK_MODES, MTFP8_MODES
from te_hal.schema.formats import ScalingMode
from te_hal.schema.gemm import pairing
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import SUPPORTED, Code, Support

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_hal.schema.support import Call

_BUILT = BLOCK_MODES | MTFP8_MODES | {ScalingMode.TENSOR}


def supports(call: Call) -> Support:
    """Yes to every dtype, format, layout and flag of the schemas, on any device, in every scaling mode but NVFP4."""
    for mode in _modes(call):
        if mode not in _BUILT:
            return Support.no(Code.MODE, f"scaling mode '{mode.value}' is not built yet")
    return pairing(call) if call.op == "gemm" else SUPPORTED


def _modes(call: Call) -> Iterator[ScalingMode]:
    if "mode" in call.flags:
        yield ScalingMode(call.flags["mode"])
    for kind in call.kinds.values():
        if isinstance(kind, StorageKind):
            yield kind.mode
