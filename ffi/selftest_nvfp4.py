"""The selftest's cases of NVFP4: casts in every mode, decoding, and products."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.block_scales import block_copy
from te_hal.schema.formats import E2M1, ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import set_tensor_amax, tensor_amax
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Case = tuple[str, tuple[Any, ...], dict[str, Any]]

_MODES = (ScalingMode.NVFP4, ScalingMode.NVFP4_16X16, ScalingMode.NVFP4_HADAMARD)
_SEED = (3 << 40) + 11
#: Layouts, shapes of both operands, and modes that go together.
_PRODUCTS = (
    ("fprop", ((144, 272), (80, 272)), (ScalingMode.NVFP4, ScalingMode.NVFP4_16X16)),
    ("dgrad", ((144, 80), (80, 272)), (ScalingMode.NVFP4, ScalingMode.NVFP4_16X16)),
    ("wgrad", ((144, 80), (144, 272)), (ScalingMode.NVFP4_HADAMARD, ScalingMode.NVFP4_HADAMARD)),
)


def nvfp4_cases(draw: Callable[..., torch.Tensor]) -> Iterator[Case]:
    """Op, operands on the CPU, and flags."""
    for mode, seed in itertools.product(_MODES, (None, _SEED)):
        if mode is not ScalingMode.NVFP4_16X16 or seed is None:
            flags = {"dtype": E2M1.dtype, "mode": mode.value, "columnwise": True, "rounding_seed": seed}
            yield "quantize", (draw(144, 272, spread=8.0),), flags
            yield "quantize", (draw(16, 1040),), flags
    for mode in _MODES:
        yield "dequantize", (_storage(mode, (144, 272)),), {}
    for layout, shapes, modes in _PRODUCTS:
        given = (_storage(mode, shape) for mode, shape in zip(modes, shapes, strict=True))
        yield "gemm", tuple(given), {"layout": layout}


def _storage(mode: ScalingMode, shape: tuple[int, int]) -> QuantizedStorage:
    """Both copies, each of codes and scales of its own, but for squares, which have the rowwise one alone."""
    both = mode is not ScalingMode.NVFP4_16X16
    kind = StorageKind.of(E2M1, mode, rowwise=True, columnwise=both, order=ColumnwiseOrder.TRANSPOSED)
    storage = QuantizedStorage.empty(kind, shape, torch.bfloat16, "cpu")
    generator = torch.Generator().manual_seed(len(mode.value))
    for codes, scale_inv in zip(storage.tensors()[::2], storage.tensors()[1::2], strict=True):
        if codes is not None and scale_inv is not None:
            codes.random_(0, 256, generator=generator)
            scale_inv.random_(0x30, 0x48, generator=generator)
            set_tensor_amax(scale_inv, torch.tensor([1234.5]))
    return storage


def copy_tensors(storage: QuantizedStorage, *, rowwise: bool) -> list[torch.Tensor]:
    """What counts of a copy: codes, scales without their padding, amax."""
    copy = block_copy(storage, rowwise=rowwise)
    scale_inv = storage.rowwise_scale_inv if rowwise else storage.columnwise_scale_inv
    grid = copy.grid.flatten().clone(memory_format=torch.contiguous_format)
    return [copy.codes, grid, tensor_amax(scale_inv)]  # type: ignore[arg-type] # comes with its codes
