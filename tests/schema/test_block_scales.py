"""Storages with a scale per block: the layouts of scale_inv, and what follows into another shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_hal.schema.block_scales import BLOCK_MODES, scale_grid, scale_shape
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import E4M3, ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage, StorageKind

TENSOR, ROW, SQUARE, MX, _, _, _, *MTFP8 = ScalingMode

#: Rowwise and columnwise scale_inv of each mode, as docs/numerics.md (B1, M1) has them, written out.
SHAPES: dict[tuple[ScalingMode, tuple[int, ...]], tuple[tuple[int, int], tuple[int, int]]] = {
    (ROW, (256, 256)): ((2, 256), (2, 256)),
    (ROW, (130, 300)): ((3, 132), (2, 300)),
    (ROW, (2, 3, 5)): ((1, 8), (1, 8)),
    (ROW, (7,)): ((1, 4), (1, 8)),
    (ROW, ()): ((1, 4), (1, 4)),
    (ROW, (0, 4)): ((1, 0), (0, 4)),
    (SQUARE, (256, 256)): ((2, 4), (2, 4)),
    (SQUARE, (130, 700)): ((2, 8), (6, 4)),
    (MX, (256, 256)): ((256, 8), (8, 256)),
    (MX, (96, 96)): ((128, 4), (4, 128)),
    (MX, (130, 300)): ((256, 12), (8, 384)),
}


@pytest.mark.parametrize(("mode", "shape"), SHAPES, ids=str)
def test_a_scale_inv_has_the_shape_of_its_rule(mode: ScalingMode, shape: tuple[int, ...]) -> None:
    assert (scale_shape(mode, shape, rowwise=True), scale_shape(mode, shape, rowwise=False)) == SHAPES[mode, shape]


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("mode", sorted(BLOCK_MODES))
def test_the_grid_of_blocks_shows_each_element_its_factor(mode: ScalingMode, rowwise: bool) -> None:
    m, k = 150, 300
    place = {  # of element (i, j) in scale_inv
        (ROW, True): lambda i, j: (j // 128, i),
        (ROW, False): lambda i, j: (i // 128, j),
        (SQUARE, True): lambda i, j: (i // 128, j // 128),
        (SQUARE, False): lambda i, j: (j // 128, i // 128),
        (MX, True): lambda i, j: (i, j // 32),
        (MX, False): lambda i, j: (i // 32, j),
    }[mode, rowwise]
    size = scale_shape(mode, (m, k), rowwise=rowwise)
    scale_inv = torch.arange(size[0] * size[1]).view(size)
    grid = scale_grid(scale_inv, mode, (m, k), rowwise=rowwise)
    down, along = -(-m // grid.shape[0]), -(-k // grid.shape[1])
    down, along = (1 if down == 1 else 32 if mode is MX else 128), (1 if along == 1 else 32 if mode is MX else 128)
    for i, j in [(0, 0), (31, 127), (32, 128), (149, 299), (127, 31), (128, 256)]:
        assert grid[i // down, j // along] == scale_inv[place(i, j)]


def blocks(mode: ScalingMode, shape: tuple[int, ...], order: str = "transposed", **copies: bool) -> QuantizedStorage:
    copies = {"rowwise": True, "columnwise": True, **copies}
    kind = StorageKind.of(E4M3, mode, order=ColumnwiseOrder(order), **copies)
    return QuantizedStorage.empty(kind, shape, torch.bfloat16, "cpu")


@pytest.mark.parametrize("mode", sorted(BLOCK_MODES))
@pytest.mark.parametrize("order", ["transposed", "same"])
def test_scales_of_blocks_follow_where_the_last_dimension_stays(mode: ScalingMode, order: str) -> None:
    before = blocks(mode, (4, 6, 32), order)
    after = before.view((-1, 32))
    assert after.shape == (24, 32)
    assert [a.data_ptr() for a in after.tensors() if a is not None] == [b.data_ptr() for b in before.tensors()]  # type: ignore[union-attr]
    given = {name: getattr(after, name) for name in QuantizedStorage.__slots__ if name not in ("device", "kind")}
    assert QuantizedStorage(**given).kind is before.kind
    assert before.view((4, 6, 32)) is before


@pytest.mark.parametrize("wanted", [(12, 64), (768,), (32, 24)], ids=str)
@pytest.mark.parametrize("mode", sorted(BLOCK_MODES))
def test_scales_of_blocks_follow_into_no_other_rows(mode: ScalingMode, wanted: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="same last dimension: its scales belong to blocks"):
        blocks(mode, (24, 32)).view(wanted)


def test_rows_without_elements_keep_their_number() -> None:
    with pytest.raises(ArgumentError, match="its scales belong to blocks"):
        blocks(ROW, (3, 0)).view((5, 0))


WRONG: dict[str, tuple[ScalingMode, dict[str, Any], str]] = {
    "one factor": (ROW, {"rowwise_scale_inv": torch.ones(1)}, r"of shape \(1,\) on cpu; accepted: .*\(2, 24\)"),
    "without padding": (SQUARE, {"columnwise_scale_inv": torch.ones(2, 1)}, r"accepted: .* of shape \(2, 4\)"),
    "floats for codes": (MX, {"rowwise_scale_inv": torch.ones(128, 8)}, r"got torch.float32 .*: a torch.uint8 tensor"),
    "codes for floats": (
        ROW,
        {"columnwise_scale_inv": torch.ones(1, 200).byte()},
        r"got torch.uint8 .*: a torch.float32 tensor",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_scale_inv_of_another_shape_or_dtype_is_refused(case: str) -> None:
    mode, change, message = WRONG[case]
    whole = blocks(mode, (24, 200))
    given = {name: getattr(whole, name) for name in QuantizedStorage.__slots__ if name not in ("device", "kind")}
    with pytest.raises(ArgumentError, match=f"{next(iter(change))}: .*{message}"):
        QuantizedStorage(**{**given, **change})


def test_an_empty_storage_without_copies_has_no_scales() -> None:
    with pytest.raises(ArgumentError, match="neither copy"):
        blocks(ROW, (16, 16), rowwise=False, columnwise=False)


@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
def test_each_copy_has_scales_of_its_own_and_keeps_them_when_the_other_goes(copy: str) -> None:
    whole = blocks(ROW, (24, 200))
    kept = whole.keep(rowwise=copy == "rowwise", columnwise=copy == "columnwise")
    assert getattr(kept, f"{copy}_scale_inv") is getattr(whole, f"{copy}_scale_inv")
    assert kept.copy_to_read()[1] is getattr(whole, f"{copy}_scale_inv")
