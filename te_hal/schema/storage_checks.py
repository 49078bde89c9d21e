"""Checks of a QuantizedStorage that a user makes; kernels make theirs unchecked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.block_scales import scale_dtype, scale_shape
from te_hal.schema.errors import ArgumentError, ArgumentTypeError
from te_hal.schema.formats import E2M1
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage_kind import codes_shape

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage


def check_buffers(storage: QuantizedStorage) -> None:
    """Refuse buffers that do not make a storage: see its constructor.

    Raises:
        ArgumentError, ArgumentTypeError: names the buffer.
    """
    row, row_scale_inv, column, column_scale_inv = storage.tensors()
    if row is None and column is None:
        raise no_copy()
    _check_mode(storage)
    device: torch.device | None = None
    for name, codes, scale_inv in (("rowwise", row, row_scale_inv), ("columnwise", column, column_scale_inv)):
        if (codes is None) != (scale_inv is None):
            missing = f"{name}_data" if codes is None else f"{name}_scale_inv"
            raise ArgumentError(
                f"QuantizedStorage: {missing}",
                got="None",
                accepted="a copy together with its scale_inv",
                todo=f"pass {missing}, or leave the {name} copy out",
            )
        if codes is not None:
            device = codes.device if device is None and isinstance(codes, torch.Tensor) else device
            factors = scale_shape(storage.mode, storage.shape, rowwise=name == "rowwise")
            shape = codes_shape(storage.kind, storage.shape, rowwise=name == "rowwise")
            _check_buffer(f"{name}_data", codes, torch.uint8, shape, device)
            _check_buffer(f"{name}_scale_inv", scale_inv, scale_dtype(storage.mode), factors, device)


def _check_mode(storage: QuantizedStorage) -> None:
    if (storage.format is E2M1) is not (storage.mode in NVFP4_MODES):
        raise ArgumentError(
            "QuantizedStorage: mode",
            got=f"{storage.mode.value!r} with {storage.format.name} codes",
            accepted="E2M1 with the modes of NVFP4, E4M3 and E5M2 with the others",
            todo="correct the format or the mode",
        )


def _check_buffer(
    name: str, buffer: object, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device | None
) -> None:
    accepted = f"a {dtype} tensor of shape {shape} on {device}"
    if not isinstance(buffer, torch.Tensor):
        raise ArgumentTypeError(
            f"QuantizedStorage: {name}", got=f"a {type(buffer).__name__}", accepted=accepted, todo="pass a tensor"
        )
    if buffer.dtype != dtype or tuple(buffer.shape) != shape or buffer.device != device:
        got = f"{buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device}"
        raise ArgumentError(f"QuantizedStorage: {name}", got=got, accepted=accepted, todo="correct the buffer")


def no_copy() -> ArgumentError:
    """The error for a storage that would hold nothing."""
    return ArgumentError(
        "QuantizedStorage",
        got="neither copy",
        accepted="rowwise_data, columnwise_data or both",
        todo="keep or pass one of them",
    )
