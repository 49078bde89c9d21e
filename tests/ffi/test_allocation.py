"""The short way to memory gives what torch.empty gives, and is done without where torch does not have it."""

from __future__ import annotations

import pytest
import torch

from te_hal.ffi.allocation import empty_for

CPU = torch.device("cpu")
SHAPES = [(), (1,), (7,), (0,), (3, 5), (0, 5), (5, 0), (1, 1), (2, 3, 4), (2, 0, 4)]


@pytest.mark.parametrize("device_type", ["cpu", "nobody_has_this"])
@pytest.mark.parametrize("kind", [tuple, torch.Size], ids=["tuple", "Size"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape_strides_and_dtype_are_those_of_torch_empty(shape: tuple[int, ...], kind: type, device_type: str) -> None:
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        found, expected = empty_for(device_type)(kind(shape), dtype, CPU), torch.empty(shape, dtype=dtype)
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert found.is_contiguous()
        assert not found.requires_grad


def test_a_torch_without_the_short_way_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_dynamo")
    assert empty_for("cpu")((2, 3), torch.uint8, CPU).shape == (2, 3)


def test_a_default_device_or_dtype_of_the_user_changes_nothing() -> None:
    with torch.device("meta"):
        assert empty_for("cpu")((2, 3), torch.float32, CPU).device == CPU
