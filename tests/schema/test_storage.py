"""QuantizedStorage and its kind: what it holds, and what it refuses."""

import pytest
import torch

from te_hal.schema.formats import E4M3, E5M2, ColumnwiseOrder, ScalingMode
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


def test_a_storage_knows_its_size_in_elements_and_bytes() -> None:
    assert both_copies().numel() == 6
    assert both_copies().nbytes() == 6 + 6 + 4 + 4
    assert both_copies().device == torch.device("cpu")


def test_a_storage_without_a_copy_is_refused() -> None:
    with pytest.raises(ValueError, match="rowwise_data, columnwise_data or both"):
        QuantizedStorage(format=E4M3, mode=ScalingMode.TENSOR, shape=(2,), dtype=torch.float32)


@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
def test_keep_shares_the_wanted_copy_and_drops_the_other(copy: str) -> None:
    whole = both_copies()
    kept = whole.keep(rowwise=copy == "rowwise", columnwise=copy == "columnwise")
    held = {"rowwise": kept.rowwise_data, "columnwise": kept.columnwise_data}
    assert held.pop(copy) is getattr(whole, f"{copy}_data")
    assert list(held.values()) == [None]
    assert kept.nbytes() == 10


def test_keep_refuses_a_copy_that_is_not_there_and_nothing_at_all() -> None:
    rowwise = both_copies().keep(rowwise=True, columnwise=False)
    with pytest.raises(ValueError, match="no columnwise copy"):
        rowwise.keep(rowwise=True, columnwise=True)
    with pytest.raises(ValueError, match="rowwise_data, columnwise_data or both"):
        rowwise.keep(rowwise=False, columnwise=False)


def test_with_tensors_keeps_the_description_and_may_change_the_nominal_dtype() -> None:
    whole = both_copies()
    other = whole.with_tensors(whole.tensors(), torch.float32)
    assert (other.kind, other.shape, other.dtype) == (whole.kind, whole.shape, torch.float32)
    assert other.rowwise_data is whole.rowwise_data
