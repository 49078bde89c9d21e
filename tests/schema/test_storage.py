"""QuantizedStorage and its kind: what it holds, and what it refuses."""

import itertools
from typing import Any

import pytest
import torch

from te_hal.schema.errors import ArgumentError, TeHalError
from te_hal.schema.formats import E4M3, E5M2, ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage, StorageKind


def both_copies() -> QuantizedStorage:
    return QuantizedStorage(
        format=E4M3,
        mode=ScalingMode.TENSOR,
        shape=(2, 3),
        dtype=torch.bfloat16,
        rowwise_data=torch.zeros(2, 3, dtype=torch.uint8),
        rowwise_scale_inv=torch.ones(1),
        columnwise_data=torch.zeros(3, 2, dtype=torch.uint8),
        columnwise_scale_inv=torch.ones(1),
    )


def test_kinds_with_equal_properties_are_one_object() -> None:
    assert both_copies().kind is both_copies().kind
    assert both_copies().kind is not both_copies().keep(rowwise=True, columnwise=False).kind


def test_a_kind_tells_format_mode_and_copies() -> None:
    properties = {"rowwise": True, "columnwise": False, "order": ColumnwiseOrder.SAME}
    assert repr(StorageKind.of(E5M2, ScalingMode.MXFP8, **properties)) == "E5M2/mxfp8/rowwise"
    assert repr(both_copies().kind) == "E4M3/tensor/rowwise+columnwise"


def test_a_storage_knows_its_size_and_device() -> None:
    assert both_copies().numel() == 6
    assert both_copies().device == torch.device("cpu")


@pytest.mark.parametrize("order", ["same", "transposed"])
def test_a_mode_and_an_order_given_as_strings_leave_no_string_behind(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StorageKind, "_known", {})
    kind = StorageKind.of(E5M2, "nvfp4", rowwise=True, columnwise=True, order=order)  # type: ignore[arg-type]
    assert kind is StorageKind.of(E5M2, ScalingMode.NVFP4, rowwise=True, columnwise=True, order=ColumnwiseOrder(order))
    assert (type(kind.mode), type(kind.order)) == (ScalingMode, ColumnwiseOrder)
    storage = changed(mode="tensor", columnwise_order="transposed")
    assert (type(storage.mode), type(storage.columnwise_order)) == (ScalingMode, ColumnwiseOrder)
    assert "E4M3/tensor/rowwise+columnwise" in repr(storage)


@pytest.mark.parametrize("wrong", [{"mode": "tensors"}, {"order": "row"}], ids=str)
def test_an_unknown_mode_or_order_is_refused(wrong: dict[str, Any]) -> None:
    properties = {"mode": ScalingMode.TENSOR, "order": ColumnwiseOrder.SAME, **wrong}
    with pytest.raises(ArgumentError, match=f"got '{next(iter(wrong.values()))}'; accepted: '"):
        StorageKind.of(E4M3, rowwise=True, columnwise=False, **properties)


def changed(**changes: Any) -> QuantizedStorage:
    """The storage of `both_copies`, some arguments of the constructor changed."""
    whole = both_copies()
    given = {name: getattr(whole, name) for name in QuantizedStorage.__slots__ if name not in ("device", "kind")}
    return QuantizedStorage(**{**given, **changes})


WRONG = {
    "scale_missing": ({"rowwise_scale_inv": None}, r"rowwise_scale_inv: got None; accepted: a copy together with"),
    "codes_missing": ({"columnwise_data": None}, r"columnwise_data: got None; accepted: a copy together with"),
    "codes_no_tensor": ({"rowwise_data": [0]}, r"rowwise_data: got a list; accepted: a torch.uint8 tensor of shape"),
    "codes_dtype": ({"rowwise_data": torch.zeros(2, 3)}, r"rowwise_data: got torch.float32 of shape \(2, 3\)"),
    "codes_shape": (
        {"columnwise_data": torch.zeros(2, 3, dtype=torch.uint8)},
        r"columnwise_data: got torch.uint8 of shape \(2, 3\) on cpu; accepted: a torch.uint8 tensor of shape \(3, 2\)",
    ),
    "scale_dtype": ({"columnwise_scale_inv": torch.ones(1).half()}, r"columnwise_scale_inv: got torch.float16"),
    "scale_shape": ({"rowwise_scale_inv": torch.tensor(1.0)}, r"rowwise_scale_inv: got torch.float32 of shape \(\)"),
    "scale_device": (
        {"rowwise_scale_inv": torch.ones(1, device="meta")},
        r"of shape \(1,\) on meta; accepted: .* on cpu",
    ),
    "format": ({"format": "E4M3"}, r"QuantizedStorage: format: got dtype 'E4M3'"),
    "mode": ({"mode": "tensors"}, r"ScalingMode: got 'tensors'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_buffers_that_do_not_make_a_storage_are_refused(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(TeHalError, match=message):
        changed(**changes)


def test_a_storage_without_a_copy_is_refused() -> None:
    with pytest.raises(ArgumentError, match="rowwise_data, columnwise_data or both"):
        QuantizedStorage(format=E4M3, mode=ScalingMode.TENSOR, shape=(2,), dtype=torch.float32)


@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
def test_keep_shares_the_wanted_copy_and_drops_the_other(copy: str) -> None:
    whole = both_copies()
    kept = whole.keep(rowwise=copy == "rowwise", columnwise=copy == "columnwise")
    held = {"rowwise": kept.rowwise_data, "columnwise": kept.columnwise_data}
    assert held.pop(copy) is getattr(whole, f"{copy}_data")
    assert list(held.values()) == [None]
    assert kept.keep(rowwise=copy == "rowwise", columnwise=copy == "columnwise") is kept


def test_keep_refuses_a_copy_that_is_not_there_and_nothing_at_all() -> None:
    rowwise = both_copies().keep(rowwise=True, columnwise=False)
    with pytest.raises(ArgumentError, match=r"rowwise=True, columnwise=True of E4M3/tensor/rowwise;"):
        rowwise.keep(rowwise=True, columnwise=True)
    with pytest.raises(ArgumentError, match="rowwise_data, columnwise_data or both"):
        rowwise.keep(rowwise=False, columnwise=False)


def test_with_tensors_keeps_the_description_and_may_change_the_nominal_dtype() -> None:
    whole = both_copies()
    other = whole.with_tensors(whole.tensors(), torch.float32)
    assert (other.kind, other.shape, other.dtype) == (whole.kind, whole.shape, torch.float32)
    assert other.rowwise_data is whole.rowwise_data


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("order", ["transposed", "same"])
def test_the_rowwise_copy_is_read_where_there_is_one(order: str, rowwise: bool) -> None:
    codes = torch.arange(6, dtype=torch.uint8).view(2, 3)
    turned = order == "transposed"
    column, one, two = codes.t().contiguous() if turned else codes.clone(), torch.tensor([0.5]), torch.tensor([2.0])
    storage = changed(
        columnwise_order=order,
        rowwise_data=codes if rowwise else None,
        rowwise_scale_inv=one if rowwise else None,
        columnwise_data=column,
        columnwise_scale_inv=two,
    )
    found, scale_inv, transposed = storage.copy_to_read()
    assert found is (codes if rowwise else column)
    assert scale_inv is (one if rowwise else two)
    assert torch.equal(found.t() if transposed else found, codes)


COPIES = [(True, False), (False, True), (True, True)]


def numbered(shape: tuple[int, ...], order: str, *, rowwise: bool, columnwise: bool) -> QuantizedStorage:
    """Codes that count up in the logical order."""
    count = int(torch.Size(shape).numel())
    codes = torch.arange(count, dtype=torch.uint8).view(shape)
    column = codes.movedim(-1, 0).contiguous() if order == "transposed" else codes.clone()
    scale_inv = torch.ones(1)
    return QuantizedStorage(
        format=E4M3,
        mode=ScalingMode.TENSOR,
        shape=shape,
        dtype=torch.float32,
        rowwise_data=codes if rowwise else None,
        rowwise_scale_inv=scale_inv if rowwise else None,
        columnwise_data=column if columnwise else None,
        columnwise_scale_inv=scale_inv if columnwise else None,
        columnwise_order=ColumnwiseOrder(order),
    )


@pytest.mark.parametrize(("shape", "wanted"), [((2, 3, 4), (-1, 4)), ((6, 4), (3, 2, 4)), ((2, 12), (4, 6))], ids=str)
@pytest.mark.parametrize(("copies", "order"), list(itertools.product(COPIES, ["transposed", "same"])), ids=str)
def test_every_copy_that_can_follows_into_another_shape(
    shape: tuple[int, ...], wanted: tuple[int, ...], copies: tuple[bool, bool], order: str
) -> None:
    before = numbered(shape, order, rowwise=copies[0], columnwise=copies[1])
    follows = copies[1] and (order == "same" or shape[-1] == wanted[-1])
    if not (copies[0] or follows):
        with pytest.raises(ArgumentError, match="shapes with the same last dimension"):
            before.view(wanted)
        return
    after = before.view(wanted)
    whole = torch.arange(24, dtype=torch.uint8).view(wanted)
    assert after.shape == tuple(whole.shape)
    assert (after.kind.rowwise, after.kind.columnwise) == (copies[0], follows)
    for copy in (after, after.keep(rowwise=False, columnwise=True)) if follows else (after,):
        codes, _, turned = copy.copy_to_read()
        assert torch.equal(codes.movedim(0, -1) if turned else codes, whole)
    assert before.shape == shape
    assert after.tensors()[0] is None or after.tensors()[0].data_ptr() == before.tensors()[0].data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [(5,), (-1, 5), (-1, -1), (2, -3), (0, -1)], ids=str)
def test_a_view_of_another_number_of_elements_is_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="shapes of 6 elements"):
        both_copies().view(wrong)


def test_a_view_of_its_own_shape_is_the_storage_itself() -> None:
    whole = both_copies()
    assert whole.view((-1, 3)) is whole


@pytest.mark.parametrize(("rowwise", "columnwise"), COPIES)
@pytest.mark.parametrize("order", list(ColumnwiseOrder))
@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (), (0, 4)], ids=str)
@pytest.mark.parametrize("mode", [mode for mode in ScalingMode if mode not in NVFP4_MODES])
def test_an_empty_storage_is_one_that_the_constructor_accepts(
    mode: ScalingMode, shape: tuple[int, ...], order: ColumnwiseOrder, rowwise: bool, columnwise: bool
) -> None:
    kind = StorageKind.of(E5M2, mode, rowwise=rowwise, columnwise=columnwise, order=order)
    made = QuantizedStorage.empty(kind, shape, torch.float16, "cpu")
    given = {name: getattr(made, name) for name in QuantizedStorage.__slots__ if name not in ("device", "kind")}
    again = QuantizedStorage(**given)
    assert (again.kind, again.shape, again.dtype, again.device) == (kind, shape, torch.float16, made.device)
