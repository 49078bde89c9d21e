"""What the null backend answers: yes to every call whose result the schema describes."""

from __future__ import annotations

from te_hal.schema.formats import ScalingMode
from te_hal.schema.support import SUPPORTED, Call, Code, Support


def supports(call: Call) -> Support:
    """No only to scaling modes whose scales have no shape in the schema yet."""
    mode = call.flags.get("mode", ScalingMode.TENSOR)
    if mode != ScalingMode.TENSOR:
        return Support.no(Code.MODE, f"makes storages of scaling mode 'tensor' only, not {ScalingMode(mode).value!r}")
    return SUPPORTED
