"""replace_raw_data: the rowwise codes of a quantized tensor move into a buffer of the caller's."""

from __future__ import annotations

from typing import Any

import torch

from te_hal.quantization.quantized_tensor import QuantizedTensor
from te_hal.schema.errors import ArgumentError, ArgumentTypeError
from te_hal.schema.storage import QuantizedStorage

_WHERE = "replace_raw_data"


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    """Copy the rowwise codes into ``new_raw_data`` and have the tensor use that from now on, in place.

    So the weights of a model can lie in one buffer. Scales, the columnwise copy and the values stay as they are; what
    is written to the buffer later is codes, which a columnwise copy does not follow.

    Args:
        tensor: with a rowwise copy, of any format of one part.
        new_raw_data: uint8, of shape and device of the codes (of NVFP4 two in a byte), contiguous; a view is taken.

    Raises:
        ArgumentTypeError: ``tensor`` is no QuantizedTensor.
        ArgumentError: it has no rowwise codes, or the buffer does not fit.
    """
    if not isinstance(tensor, QuantizedTensor):
        raise ArgumentTypeError(
            f"{_WHERE}: tensor",
            got=f"a {type(tensor).__name__}",
            accepted="a QuantizedTensor",
            todo="quantize it first",
        )
    storage: Any = tensor.quantized_storage
    if not isinstance(storage, QuantizedStorage) or storage.rowwise_data is None:
        raise ArgumentError(
            f"{_WHERE}: tensor",
            got=repr(storage),
            accepted="a tensor with a rowwise copy, of one format",
            todo="call update_usage(rowwise_usage=True), or replace the data of its parts",
        )
    codes = storage.rowwise_data
    if _layout(new_raw_data) != _layout(codes):
        raise ArgumentError(
            f"{_WHERE}: new_raw_data",
            got=" ".join(map(str, _layout(new_raw_data))),
            accepted=" ".join(map(str, _layout(codes))),
            todo="allocate it as the codes are, or take a view of a larger buffer",
        )
    buffer = new_raw_data.detach()
    buffer.copy_(codes)
    tensor.quantized_storage = storage.with_tensors((buffer, *storage.tensors()[1:]))


def _layout(tensor: object) -> tuple[object, ...]:
    if not isinstance(tensor, torch.Tensor):
        return (f"a {type(tensor).__name__}",)
    return (
        tensor.dtype,
        tuple(tensor.shape),
        f"on {tensor.device}",
        "contiguous" if tensor.is_contiguous() else "strided",
    )
