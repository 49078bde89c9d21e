"""Results taken apart into the tensors that count: codes and factors of each copy, without the padding of factors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from te_hal.schema.block_scales import scale_grid
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage
from te_hal.testing.finding import Finding
from te_hal.testing.oracles import nvfp4

if TYPE_CHECKING:
    from te_hal.testing.finding import Kind
    from te_hal.testing.oracles import cast

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(NamedTuple):
    """A tensor of a result.

    Attributes:
        label: of which result, and which of its tensors.
        tensor: on the CPU, contiguous. Codes lie as ``[M, K]`` in either order of a storage, one a byte.
    """

    label: str
    tensor: torch.Tensor


def parts(name: str, value: Any) -> list[Part]:  # noqa: ANN401 - whatever a result or an expectation is
    """Of a tensor, an array, a storage, or a dict of a storage's copies (True: rowwise)."""
    if isinstance(value, QuantizedStorage):
        return _of_storage(name, value)
    if isinstance(value, dict):
        return [part for rowwise, copy in value.items() for part in _of_copy(name, copy, rowwise=rowwise)]
    tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
    return [Part(name, tensor.detach().cpu().contiguous())]


def _of_storage(name: str, storage: QuantizedStorage) -> list[Part]:
    row, row_factors, column, column_factors = storage.tensors()
    found = []
    for rowwise, codes, factors in ((True, row, row_factors), (False, column, column_factors)):
        if codes is None or factors is None:
            continue
        if storage.mode in NVFP4_MODES:
            found += _of_copy(name, nvfp4.stored(storage, rowwise=rowwise), rowwise=rowwise)
            continue
        turned = not rowwise and storage.kind.order is ColumnwiseOrder.TRANSPOSED and len(storage.shape) > 1
        lying = codes.detach().movedim(0, -1) if turned else codes.detach()
        grid = factors.detach()
        if storage.mode is not ScalingMode.TENSOR:
            grid = scale_grid(grid, storage.mode, storage.shape, rowwise=rowwise)
        which = _which(rowwise=rowwise)
        cols = storage.shape[-1] if storage.shape else 1
        found += [Part(f"{name}.{which}_data", lying.cpu().contiguous().view(-1).view(_rows(storage.shape), cols))]
        found += [Part(f"{name}.{which}_scale_inv", grid.cpu().contiguous())]
    return found


def _of_copy(name: str, copy: cast.Copy | nvfp4.Copy, *, rowwise: bool) -> list[Part]:
    which = _which(rowwise=rowwise)
    codes, factors = torch.from_numpy(copy.codes), torch.from_numpy(copy.factors)
    found = [Part(f"{name}.{which}_data", codes), Part(f"{name}.{which}_scale_inv", factors)]
    if isinstance(copy, nvfp4.Copy):
        found.append(Part(f"{name}.{which}_amax", torch.from_numpy(copy.amax)))
    return found


def _which(*, rowwise: bool) -> str:
    return "rowwise" if rowwise else "columnwise"


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def kept_of(found: dict[str, Any]) -> list[Part]:
    """Copies of everything that a call gave, on the CPU."""
    return [Part(p.label, p.tensor.clone()) for name, value in found.items() for p in parts(name, value)]


def compared(first: list[Part], second: list[Part], kind: Kind) -> list[Finding]:
    """A finding of a kind for every part that is not the same bits in two calls with the same operands."""
    findings = []
    for one, other in zip(first, second, strict=True):
        fits = one.tensor.shape == other.tensor.shape and one.tensor.dtype == other.tensor.dtype
        differ = not fits or unequal(one.tensor, other.tensor).any()
        if differ:
            findings.append(Finding(kind, f"{one.label} differs between two calls with the same operands"))
    return findings


def unequal(found: torch.Tensor, due: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one shape and dtype differ in a bit; every NaN of a float dtype equals every other."""
    integer = _INTEGERS[found.element_size()]
    differ = _bits(found, integer) != _bits(due, integer)
    if found.is_floating_point():
        differ &= ~(found.isnan() & due.isnan())
    return differ


def _bits(tensor: torch.Tensor, integer: torch.dtype) -> torch.Tensor:
    return tensor.reshape(-1).view(integer).reshape(tensor.shape)
