"""What cpu_reference can do, asked before a kernel is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.formats import ScalingMode
from te_hal.schema.gemm import pairing
from te_hal.schema.support import SUPPORTED, Code, Support

if TYPE_CHECKING:
    from te_hal.schema.support import Call


def supports(call: Call) -> Support:
    """Yes to every dtype, format, layout and flag of the schemas, on any device, in every scaling mode.

    But for products that nobody has, and Hadamard's transform of anything but bf16 (NV6).
    """
    if call.flags.get("mode") == ScalingMode.NVFP4_HADAMARD and call.flags.get("columnwise"):
        dtype = next(iter(call.kinds.values()), None)
        if isinstance(dtype, torch.dtype) and dtype is not torch.bfloat16:
            return Support.no(
                Code.DTYPE,
                f"Hadamard's transform takes torch.bfloat16, not {dtype}; compute in bf16, or leave the transform out"
                " (mode 'nvfp4', NVFP4BlockScaling(disable_rht=True))",
            )
    return pairing(call) if call.op == "gemm" else SUPPORTED
