"""The backends that run kernel libraries, as the tests of tests/backends/native meet them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from host_library import host_library_path

import te_hal
from te_hal.ffi.binding import binding
from te_hal.ffi.native import native_of
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from te_hal.ffi.library import Library

#: Of the emulated device: (threads of the host, wave, seed). In sequence, and two random orders with either wave.
ORDERS = {
    "in sequence": (2, 32, -1),
    "random, wave 32": (2, 32, 1),
    "random, wave 128": (1, 128, 2),
    "random again, wave 128": (2, 128, 3),
}

#: How far losses of ten steps may be from the reference's, as a share. Products are summed in another order, which
#: casts of later layers and steps enlarge; an NVIDIA GPU adds FP8 products with fewer bits besides (5.1e-3 on an H200).
LOSSES_APART = {"musa_emulator": 1e-3, "cuda": 1e-2}


@dataclass(frozen=True)
class NativeBackend:
    """A usable backend and the device type of its tensors."""

    name: str
    device: str

    def use(self) -> AbstractContextManager[None]:
        """Everything inside runs on it."""
        return te_hal.use_backend(self.name)

    def put(self, value: Any) -> Any:
        """A copy of a tensor or storage on its device; on the host as well, so that nothing is shared."""
        if isinstance(value, torch.Tensor):
            return value.detach().clone().to(self.device)
        if isinstance(value, QuantizedStorage):
            return value.with_tensors(tuple(None if t is None else self.put(t) for t in value.tensors()))
        return value


def emulator(order: str = "in sequence") -> NativeBackend:
    """The emulator, its library built from the sources as they are; skips where that cannot be."""
    host_library_path()
    _need("musa_emulator")
    assert binding().lib.api_configure_emulator(library_of("musa_emulator").api, *ORDERS[order]) == 0
    return NativeBackend("musa_emulator", "cpu")


def library_of(name: str) -> Library:
    """The library that the emulator's kernels are bound to."""
    native = native_of(name)
    assert native is not None
    return native.library


def cuda() -> NativeBackend:
    """The GPU's backend; skips on a machine without one."""
    _need("cuda")
    return NativeBackend("cuda", "cuda")


def _need(name: str) -> None:
    row = next(row for row in te_hal.list_backends() if row.name == name)
    if not row.usable:
        pytest.skip(f"{name}: {row.reason}")


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Whether all bytes are equal, wherever the tensors lie; a NaN of a float dtype equals every other one."""
    if found is None or expected is None:
        return found is expected
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if found.dtype.is_floating_point and found.numel():
        nan = expected.isnan()
        if not torch.equal(found.isnan(), nan):
            return False
        found, expected = found.masked_fill(nan, 0.0), expected.masked_fill(nan, 0.0)
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def assert_same_storage(found: QuantizedStorage, expected: QuantizedStorage) -> None:
    """Kind, nominal dtype, and every byte of both copies and their scale_inv, wherever they lie."""
    assert found.kind is expected.kind
    assert found.dtype == expected.dtype
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    wrong = [n for n, a, b in zip(names, found.tensors(), expected.tensors(), strict=True) if not same(a, b)]
    assert not wrong


def assert_nearly_same_codes(found: torch.Tensor, expected: torch.Tensor) -> None:
    """One FP8 code in a thousand may be off, by one."""
    found, expected = _in_order(found.cpu()), _in_order(expected.cpu())
    off = (found != expected).sum().item()
    assert off * 1000 <= found.numel(), f"{off} of {found.numel()}"
    assert found.numel() == 0 or (found - expected).abs().max().item() <= 1


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Integers that are neighbours where the values of two FP8 codes are."""
    wide = codes.int()
    return torch.where(wide >= 0x80, 0x80 - wide, wide)
