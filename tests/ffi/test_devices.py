"""A device is prepared once, by its first call: its FP8 instruction is used only where it agrees with the rules."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING

import native_stub
import pytest
import torch

from te_hal.ffi.binding import binding
from te_hal.ffi.devices import Devices
from te_hal.ffi.loader import open_library
from te_hal.ffi.marshalling import kernels
from te_hal.ffi.native import Native
from te_hal.schema.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def over(path: Path, entered: list[torch.device]) -> Native:
    """A backend whose one device is the CPU, under the number None."""

    def enter(device: torch.device) -> object:
        entered.append(device)
        return warnings.catch_warnings(record=False)

    native = Native("stub", "host", Devices("cpu", stream=lambda _: 77, current=lambda: None, enter=enter))
    native.library = open_library(path)
    native.lib, native.ffi = binding()
    return native


def preparations(path: Path) -> list[dict[str, float]]:
    return [given for name, given in native_stub.calls(path) if name == "select_fp8_encoder"]


def test_the_first_call_compares_the_instruction_and_later_ones_do_not(stub: Callable[..., Path]) -> None:
    entered: list[torch.device] = []
    native = over(stub(), entered)
    amax = kernels(native)["amax"]
    amax(torch.ones(3))
    (given,) = preparations(native.library.path)
    assert (given["instruction"], given["stream"]) == (1, 77)
    assert len(entered) == 2
    amax(torch.ones(3))
    kernels(native)["compute_scale"](torch.ones(3), fp8_max=448.0)
    assert preparations(native.library.path) == []
    assert len(entered) == 2


def test_sixteen_threads_prepare_once(stub: Callable[..., Path]) -> None:
    native = over(stub(), [])
    amax, barrier = kernels(native)["amax"], threading.Barrier(16)

    def call() -> None:
        barrier.wait()
        amax(torch.ones(3))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert native._prepared.ready == {None}
    assert len(preparations(native.library.path)) <= 1


def test_an_instruction_that_differs_is_not_used_and_a_warning_says_so(stub: Callable[..., Path]) -> None:
    native = over(stub(MISMATCHES=5), [])
    with pytest.warns(UserWarning, match="differs from the rules in 5 bit patterns"):
        kernels(native)["amax"](torch.ones(3))


def test_a_device_without_an_instruction_is_no_error_and_any_other_failure_is(stub: Callable[..., Path]) -> None:
    kernels(over(stub("libnone.so", ENCODER_STATUS="TE_HAL_UNSUPPORTED"), []))["amax"](torch.ones(3))
    with pytest.raises(KernelError, match="select_fp8_encoder on backend stub"):
        kernels(over(stub("libbad.so", ENCODER_STATUS="TE_HAL_DEVICE_ERROR"), []))["amax"](torch.ones(3))
