"""The cast family: into a scaled narrow format and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import entry
from te_hal.schema.cast import DEQUANTIZE, QUANTIZE
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode

if TYPE_CHECKING:
    import torch

    from te_hal.schema.storage import QuantizedStorage

_enter_quantize = entry(QUANTIZE)
_enter_dequantize = entry(DEQUANTIZE)


def quantize(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    out: QuantizedStorage | None = None,
    dtype: torch.dtype,
    mode: ScalingMode = ScalingMode.TENSOR,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
    rounding_seed: int | None = None,
) -> QuantizedStorage:
    """Cast to a scaled 8-bit or 4-bit format: ``clamp(input * scale)``, rounded to nearest even (C1 to C5).

    In per-tensor mode the scale is given; in the others each block of elements finds its own (B1 to B3, M1, M2; NV1 to
    NV6), a rowwise copy's blocks lying along the last dimension, a columnwise copy's across it.

    Args:
        input: any shape; fp32, fp16 or bf16.
        scale: fp32, one element; multiplies into the format. Required for per-tensor scaling, and for it alone.
            No value is refused, as that would read it: NaN gives codes of NaN (C3); zero gives codes of zero, of NaN
            where the input is infinite, and an infinite scale_inv (C5); a negative one flips the signs of the codes
            and of scale_inv, so that dequantizing flips them back.
        amax: fp32, one element; becomes ``max(amax, max|input|)`` in place (A1). For per-tensor scaling.
        out: storage to refill in place; must have the shape, format, mode and copies that are asked for.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``; for the modes of NVFP4 ``torch.uint8``, E2M1 codes
            two a byte.
        mode: how many elements share a scale.
        rowwise: make the rowwise copy.
        columnwise: make the columnwise copy.
        columnwise_order: memory order of the columnwise copy.
        amax_epsilon: floor of each block's amax (S1); for modes ``block_1x128`` and ``block_128x128``.
        power_of_2: round each block's scale down to a power of two (S4); for the same modes.
        rounding_seed: for modes ``nvfp4`` and ``nvfp4_hadamard``: round stochastically, by numbers that follow from
            this seed alone (NV5); None: to the nearest. From 0 to 2**64 - 1.

    Returns:
        A storage with the asked copies, nominal dtype that of ``input``; ``out`` itself where given.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_quantize(
        input,
        scale,
        amax,
        out,
        dtype,
        mode,
        rowwise,
        columnwise,
        columnwise_order,
        amax_epsilon,
        power_of_2,
        rounding_seed,
    )
    result: QuantizedStorage = kernel(
        input,
        scale,
        amax=amax,
        out=out,
        dtype=dtype,
        mode=mode,
        rowwise=rowwise,
        columnwise=columnwise,
        columnwise_order=columnwise_order,
        amax_epsilon=amax_epsilon,
        power_of_2=power_of_2,
        rounding_seed=rounding_seed,
    )
    return result


def dequantize(input: QuantizedStorage, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Back to plain values: ``decode(code) * scale_inv`` in fp32, rounded once (C6, B4, M3, NV7).

    Args:
        input: quantized data, any shape. The rowwise copy is read where there is one.
        out_dtype: fp32, fp16 or bf16; None: the storage's nominal dtype.

    Returns:
        A new tensor of the shape of ``input``.

    Raises:
        ArgumentError, ArgumentTypeError: not a storage, or another dtype.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_dequantize(input, out_dtype)
    result: torch.Tensor = kernel(input, out_dtype=out_dtype)
    return result
