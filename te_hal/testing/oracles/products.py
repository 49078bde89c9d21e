"""float64 oracles of the gemm family (G1 to G5, B5, NV8)."""

from __future__ import annotations

from typing import Any

import torch

from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage
from te_hal.testing.oracles import cast, nvfp4
from te_hal.testing.oracles.bounded import Due, oracle

#: Whether the rowwise copies of a and b have their blocks along the sum.
_ALONG = {"fprop": (True, True), "dgrad": (True, False), "wgrad": (False, False)}
#: Products and results below fp32's normal range may be taken as zero (G1).
_FLUSHED = 2.0**-126


def _values(operand: torch.Tensor | QuantizedStorage, *, rowwise: bool) -> torch.Tensor:
    if isinstance(operand, QuantizedStorage) and operand.mode in NVFP4_MODES:
        values, factor = nvfp4.operand(operand, rowwise=rowwise)
        return torch.from_numpy(values) * factor
    if isinstance(operand, QuantizedStorage):
        return torch.from_numpy(cast.dequantized(operand, rowwise=rowwise)).double()
    return operand.double()


@oracle("gemm")
def gemm(given: dict[str, Any]) -> dict[str, Due]:
    """The product in its layout, with bias and the old content of ``out``."""
    layout = given["layout"]
    a, b = (_values(given[name], rowwise=along) for name, along in zip("ab", _ALONG[layout], strict=True))
    left = a.t() if layout == "wgrad" else a
    right = b.t() if layout == "fprop" else b
    value, magnitude = left @ right, left.abs() @ right.abs() + _FLUSHED * (1 + left.shape[-1])
    for extra in (given["bias"], given["out"] if given["accumulate"] else None):
        if extra is not None:
            value, magnitude = value + extra.double(), magnitude + extra.double().abs()
    due = Due(value, magnitude)
    return {"output": due} if given["out"] is None else {"output": due, "out": due}


@oracle("bias_grad")
def bias_grad(given: dict[str, Any]) -> dict[str, Due]:
    """The sum over rows."""
    grad = given["grad_output"].double()
    return {"grad_bias": Due(grad.sum(0), grad.abs().sum(0))}
