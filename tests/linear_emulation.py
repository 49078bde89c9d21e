"""A linear layer under FP8 in float64: casts by ml_dtypes, products by numpy. Nothing of the package is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch

LARGEST_FP32 = np.float32(3.4028234663852886e38)


class Code(NamedTuple):
    """An 8-bit format and its largest finite magnitude."""

    dtype: type
    largest: float


E4M3 = Code(ml_dtypes.float8_e4m3fn, 448.0)
E5M2 = Code(ml_dtypes.float8_e5m2, 57344.0)


def array(tensor: torch.Tensor) -> np.ndarray:
    """Rows of a tensor in fp32, which holds every activation dtype exactly."""
    return tensor.detach().float().reshape(-1, tensor.shape[-1]).numpy()


def largest_magnitude(values: np.ndarray) -> np.float32:
    """NaN is ignored; 0 if there is nothing else."""
    magnitudes = np.abs(values[~np.isnan(values)])
    return np.float32(magnitudes.max()) if magnitudes.size else np.float32(0)


def scale_for(amax: np.float32, code: Code, *, margin: int = 0) -> np.float32 | None:
    """The scale that maps amax to the largest code; None where amax gives none (0, inf)."""
    if amax == 0 or not np.isfinite(amax):
        return None
    with np.errstate(over="ignore"):
        return np.minimum(np.float32(code.largest * 2.0**-margin) / amax, LARGEST_FP32)


def current_scale(values: np.ndarray, code: Code) -> np.float32:
    """Current scaling: the scale from the tensor's own amax, else 1."""
    found = scale_for(largest_magnitude(values), code)
    return np.float32(1) if found is None else found


@dataclass
class DelayedScale:
    """Delayed scaling of one tensor role, "max" algorithm: the scale in use and the amaxes of the last steps."""

    code: Code
    length: int
    margin: int = 0
    scale: np.float32 = np.float32(1)  # noqa: RUF009 - immutable
    seen: list[np.float32] = field(default_factory=list)

    def update(self, amax: np.float32) -> None:
        """End of a step that saw ``amax``."""
        if amax == 0:
            return
        self.seen = [*self.seen, amax][-self.length :]
        found = scale_for(max(self.seen), self.code, margin=self.margin)
        self.scale = self.scale if found is None else found


def codes(values: np.ndarray, scale: np.float32, code: Code) -> np.ndarray:
    """The codes of ``values``: scaled in fp32, clamped, rounded."""
    return np.clip(values.astype(np.float32) * scale, -code.largest, code.largest).astype(code.dtype)


def cast(values: np.ndarray, scale: np.float32, code: Code) -> np.ndarray:
    """What the codes of ``values`` stand for, in float64."""
    return codes(values, scale, code).astype(np.float64) * np.float64(np.float32(1) / scale)


class Products(NamedTuple):
    """Results of one step, in float64, as rows."""

    y: torch.Tensor
    gx: torch.Tensor
    gw: torch.Tensor
    gb: torch.Tensor


def products(
    x: np.ndarray, w: np.ndarray, bias: torch.Tensor | None, gy: np.ndarray, quantized_gy: np.ndarray
) -> Products:
    """The three products of quantized operands, given as values; the bias gradient sums the unquantized ``gy``.

    An fp32 bias is rounded to bf16 first, as docs/numerics.md (G4) says.
    """
    y = x @ w.T
    if bias is not None:
        y = y + bias.detach().to(torch.bfloat16 if bias.dtype == torch.float32 else bias.dtype).double().numpy()
    made = (y, quantized_gy @ w, quantized_gy.T @ x, gy.astype(np.float64).sum(0))
    return Products(*(torch.from_numpy(value) for value in made))
