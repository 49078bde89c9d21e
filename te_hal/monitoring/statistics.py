"""What is counted about one tensor: its amax, and what quantizing did to its values."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_hal.ops import dequantize
from te_hal.schema.formats import E2M1, ColumnwiseOrder
from te_hal.schema.nvfp4_layout import unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.quantization import Quantizer
    from te_hal.schema.formats import ElementFormat
    from te_hal.schema.storage import QuantizedStorage

#: ``x * scale`` and the scale itself are rounded to fp32; a value that only this puts beyond the format's largest one
#: does not count as clipped.
_ROUNDING = 1 + 2.0**-22


@dataclass(frozen=True)
class Statistics:
    """Numbers of one tensor, or of one role over the microbatches of a step. They stay on the tensor's device.

    Attributes:
        values: how many values there are.
        amax: largest magnitude; NaN where the tensor holds one.
        scale: factor into the format; None unquantized, and where there are several.
        clipped: how many values the format's range cut off; None unquantized.
        flushed: how many values became zero; None unquantized.
        basis: "values" where the plain tensor was seen; "codes" where a fused op made the codes and only they were
            there: ``clipped`` then counts codes of the format's largest magnitude if amax is beyond the range (with
            scales of blocks it is 0: they come from what the block holds), ``flushed`` all zero codes, and without a
            recorded amax it is that of the codes.
    """

    values: int
    amax: torch.Tensor
    scale: torch.Tensor | None = None
    clipped: torch.Tensor | None = None
    flushed: torch.Tensor | None = None
    basis: str = "values"

    @property
    def quantized(self) -> bool:
        """Whether these are numbers of a quantization."""
        return self.clipped is not None


def of_plain(tensor: torch.Tensor) -> Statistics:
    """Statistics of a tensor that is not quantized; it has at least one value."""
    low, high = torch.aminmax(tensor.detach())  # one pass without a copy, and NaN comes through
    return Statistics(tensor.numel(), torch.maximum(high, -low).float())


def of_quantized(quantizer: Quantizer, tensor: torch.Tensor | None, storage: QuantizedStorage) -> Statistics:
    """Statistics of a quantization of at least one value.

    Args:
        quantizer: that made the codes.
        tensor: what was quantized; None where only the codes exist.
        storage: the codes.
    """
    data, scale_inv = _codes(storage)
    magnitudes = data & _magnitude(storage.format)
    zeros = (magnitudes == 0).sum()
    scale = _scale(quantizer, scale_inv)
    if tensor is None:
        return _of_codes(quantizer, storage, magnitudes, scale_inv, scale)
    values = tensor.detach().float().abs()
    beyond = _beyond(values, storage) if scale is None else values * scale > storage.format.max * _ROUNDING
    return Statistics(values.numel(), values.amax(), scale, beyond.sum(), zeros - (values == 0).sum())


def _beyond(values: torch.Tensor, storage: QuantizedStorage) -> torch.Tensor:
    """Where a magnitude is larger than what its block's largest code stands for."""
    codes, _ = _codes(storage)
    largest = (codes & _magnitude(storage.format)) == _largest_code(storage.format)
    if storage.rowwise_data is None and storage.columnwise_order is ColumnwiseOrder.TRANSPOSED:
        largest = largest.movedim(0, -1)
        # Packed codes keep but one of the leading dimensions.
        largest = largest.reshape(storage.shape)
    return largest & (values > dequantize(storage, out_dtype=torch.float32).abs() * _ROUNDING)


def _of_codes(
    quantizer: Quantizer,
    storage: QuantizedStorage,
    magnitudes: torch.Tensor,
    scale_inv: torch.Tensor,
    scale: torch.Tensor | None,
) -> Statistics:
    zeros = (magnitudes == 0).sum()
    if scale is None:
        amax = dequantize(storage, out_dtype=torch.float32).abs().amax()
        return Statistics(magnitudes.numel(), amax, None, torch.zeros_like(zeros), zeros, "codes")
    amax = _amax_of_codes(quantizer, storage, magnitudes.max(), scale_inv)
    clipped = (magnitudes == _largest_code(storage.format)).sum() * (amax * scale > storage.format.max * _ROUNDING)
    return Statistics(magnitudes.numel(), amax, scale, clipped, zeros, "codes")


def combine(parts: Sequence[Statistics]) -> Statistics:
    """Numbers of several microbatches as one: counts add up, amax is the largest, scale the newest.

    Where some were quantized and some not, the quantized ones count.
    """
    quantized = [part for part in parts if part.quantized]
    chosen = quantized or list(parts)
    clipped = [part.clipped for part in chosen if part.clipped is not None]
    flushed = [part.flushed for part in chosen if part.flushed is not None]
    return Statistics(
        values=sum(part.values for part in chosen),
        amax=functools.reduce(torch.maximum, [part.amax for part in chosen]),
        scale=chosen[-1].scale,
        clipped=torch.stack(clipped).sum() if clipped else None,
        flushed=torch.stack(flushed).sum() if flushed else None,
        basis="codes" if any(part.basis == "codes" for part in chosen) else "values",
    )


def _codes(storage: QuantizedStorage) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of one copy, which hold the same values whichever it is, and the factors back."""
    codes, scale_inv = storage.columnwise_data, storage.columnwise_scale_inv
    if storage.rowwise_data is not None and storage.rowwise_scale_inv is not None:
        codes, scale_inv = storage.rowwise_data, storage.rowwise_scale_inv
    if storage.format is E2M1:
        codes = unpack(codes)  # type: ignore[arg-type] # one copy is there
    return codes, scale_inv  # type: ignore[return-value] # one copy is there


def _scale(quantizer: Quantizer, scale_inv: torch.Tensor) -> torch.Tensor | None:
    """The scale as the cast used it, copied, as delayed scaling changes its own in place."""
    if scale_inv.numel() != 1:
        return None
    given = getattr(quantizer, "scale", None)
    if isinstance(given, torch.Tensor):
        return given.detach().reshape(()).clone()
    return scale_inv.reshape(()).reciprocal()


def _amax_of_codes(
    quantizer: Quantizer, storage: QuantizedStorage, largest: torch.Tensor, scale_inv: torch.Tensor
) -> torch.Tensor:
    recorded = getattr(quantizer, "amax", None)
    # A NaN code means a NaN value, which a recorded amax leaves out.
    decoded = largest.view(storage.format.dtype).float()
    if isinstance(recorded, torch.Tensor):
        return torch.where(decoded.isnan(), decoded, recorded.detach().reshape(()))
    return decoded * scale_inv.reshape(())


def _magnitude(fmt: ElementFormat) -> int:
    """All bits of a code but its sign."""
    return 0x07 if fmt is E2M1 else 0x7F


@functools.cache
def _largest_code(fmt: ElementFormat) -> int:
    if fmt is E2M1:
        return _magnitude(fmt)
    return int(torch.tensor(fmt.max).to(fmt.dtype).view(torch.uint8).item())
