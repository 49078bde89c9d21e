"""Missing copies of quantized data come from the one that is there, byte for byte."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import te_hal.ops
from te_hal.quantization.copies import with_copies
from te_hal.schema.block_scales import BLOCK_MODES, MTFP8_MODES, SQUARE_MODES, scale_grid
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import E5M2, ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage, StorageKind

ORDERS = list(ColumnwiseOrder)


@dataclasses.dataclass
class Source:
    """A storage with some copies of known codes."""

    rowwise: bool
    columnwise: bool
    order: ColumnwiseOrder

    def storage(self, codes: torch.Tensor) -> QuantizedStorage:
        scale_inv = torch.tensor([0.5])
        return QuantizedStorage(
            format=E5M2,
            mode=ScalingMode.TENSOR,
            shape=tuple(codes.shape),
            dtype=torch.bfloat16,
            rowwise_data=codes.clone() if self.rowwise else None,
            rowwise_scale_inv=scale_inv if self.rowwise else None,
            columnwise_data=columnwise(codes, self.order) if self.columnwise else None,
            columnwise_scale_inv=scale_inv if self.columnwise else None,
            columnwise_order=self.order,
        )


def columnwise(codes: torch.Tensor, order: ColumnwiseOrder) -> torch.Tensor:
    """The documented layout, element by element."""
    if order == ColumnwiseOrder.SAME or codes.dim() == 0:
        return codes.clone()
    made = torch.empty(codes.shape[-1], *codes.shape[:-1], dtype=torch.uint8)
    for index in itertools.product(*map(range, codes.shape)):
        made[(index[-1], *index[:-1])] = codes[index]
    return made


SOURCES = [Source(True, False, ORDERS[0]), *[Source(row, True, order) for row in (True, False) for order in ORDERS]]
WANTED = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize(("rowwise_wanted", "columnwise_wanted"), WANTED)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (7,), (), (0, 4), (4, 0)], ids=str)
def test_every_wanted_copy_is_there_in_the_wanted_order(shape, order, rowwise_wanted, columnwise_wanted, source):
    codes = torch.randint(0, 255, shape, dtype=torch.uint8)
    before = source.storage(codes)
    made = with_copies(before, rowwise=rowwise_wanted, columnwise=columnwise_wanted, order=order)
    assert (made.shape, made.dtype, made.format, made.mode) == (shape, torch.bfloat16, E5M2, ScalingMode.TENSOR)
    if rowwise_wanted:
        assert torch.equal(made.rowwise_data, codes)
        assert made.rowwise_scale_inv.item() == 0.5
    if columnwise_wanted:
        assert made.columnwise_order == order
        assert torch.equal(made.columnwise_data, columnwise(codes, order))
        assert made.columnwise_data.is_contiguous()
        assert made.columnwise_scale_inv.item() == 0.5
    for copy, scale_inv in (
        (made.rowwise_data, made.rowwise_scale_inv),
        (made.columnwise_data, made.columnwise_scale_inv),
    ):
        assert (copy is None) == (scale_inv is None)
    assert torch.equal(
        before.tensors()[0 if source.rowwise else 2], source.storage(codes).tensors()[0 if source.rowwise else 2]
    )


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_what_is_there_is_not_copied(source):
    before = source.storage(torch.randint(0, 255, (3, 5), dtype=torch.uint8))
    assert with_copies(before, rowwise=source.rowwise, columnwise=source.columnwise, order=source.order) is before
    made = with_copies(before, rowwise=True, columnwise=True, order=source.order)
    if source.rowwise:
        assert made.rowwise_data is before.rowwise_data
    if source.columnwise:
        assert made.columnwise_data is before.columnwise_data


def test_a_same_order_copy_costs_no_memory():
    before = Source(True, False, ORDERS[0]).storage(torch.zeros(3, 5, dtype=torch.uint8))
    made = with_copies(before, rowwise=True, columnwise=True, order=ColumnwiseOrder.SAME)
    assert made.columnwise_data is made.rowwise_data


@pytest.mark.parametrize("mode", sorted((BLOCK_MODES | MTFP8_MODES) - SQUARE_MODES))
def test_copies_with_scales_of_their_own_are_not_derived(mode):
    kind = StorageKind.of(E5M2, mode, rowwise=True, columnwise=False, order=ORDERS[0])
    before = QuantizedStorage.empty(kind, (3, 5), torch.bfloat16, "cpu")
    assert with_copies(before, rowwise=True, columnwise=False, order=ORDERS[0]) is before
    with pytest.raises(UnsupportedError, match=f"{mode.value}.*quantize again"):
        with_copies(before, rowwise=True, columnwise=True, order=ORDERS[0])


@pytest.mark.parametrize("shape", [(300, 140), (2, 70, 260)], ids=str)
@pytest.mark.parametrize("rowwise", [True, False])
def test_a_copy_of_square_blocks_follows_from_the_other_byte_for_byte(rowwise, shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    settings = {"dtype": torch.float8_e4m3fn, "mode": ScalingMode.BLOCK_128X128}
    one = te_hal.ops.quantize(x, **settings, rowwise=rowwise, columnwise=not rowwise)
    both = te_hal.ops.quantize(x, **settings, rowwise=True, columnwise=True)
    found = with_copies(one, rowwise=True, columnwise=True, order=one.columnwise_order)
    assert found.kind is both.kind
    assert torch.equal(found.rowwise_data, both.rowwise_data)
    assert torch.equal(found.columnwise_data, both.columnwise_data)
    for copy, name in ((True, "rowwise_scale_inv"), (False, "columnwise_scale_inv")):
        grids = [scale_grid(getattr(made, name), made.mode, shape, rowwise=copy) for made in (found, both)]
        assert torch.equal(*grids)
