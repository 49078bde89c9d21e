"""A device library that was open before a fork is refused in the child; the emulator's goes on working there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import native_stub
import pytest
import torch

import te_hal
from te_hal import ops
from te_hal.ffi.binding import binding
from te_hal.ffi.devices import HOST
from te_hal.ffi.loader import open_library
from te_hal.ffi.marshalling import kernels
from te_hal.ffi.native import Native
from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def in_child(act: Callable[[], str]) -> str:
    """What ``act`` returns in a forked child, or the error that it raises there."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = act()
        except StateError as error:
            said = f"StateError: {error}"
        except BaseException as error:  # noqa: BLE001 - the parent tells
            said = f"unexpected {error!r}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def over(path: Path) -> Native:
    native = Native("stub", "host", HOST)
    native.library = open_library(path)
    native.lib, native.ffi = binding()
    return native


def test_a_device_library_is_refused_in_a_forked_child_and_not_in_the_parent(stub: Callable[..., Path]) -> None:
    native = over(stub(BACKEND='"cuda"'))
    kernel = kernels(native)["amax"]
    kernel(torch.ones(3))
    native_stub.calls(native.library.path)
    said = in_child(lambda: str(kernel(torch.ones(3))))
    assert said.startswith("StateError: ")
    assert "spawn" in said
    assert native_stub.calls(native.library.path) == []
    kernel(torch.ones(3))


def test_questions_about_devices_are_refused_in_a_forked_child_too(stub: Callable[..., Path]) -> None:
    library = open_library(stub(BACKEND='"musa"'))
    assert in_child(lambda: str(library.check_device(0))).startswith("StateError: ")
    assert in_child(lambda: str(library.device_info(0))).startswith("StateError: ")
    assert library.device_info(0).architecture == 31


def test_a_device_library_that_is_first_opened_in_the_child_works_there(stub: Callable[..., Path]) -> None:
    path = stub(BACKEND='"cuda"')
    assert in_child(lambda: open_library(path).backend) == "cuda"


@pytest.mark.usefixtures("host_library")
def test_the_emulator_works_in_a_forked_child() -> None:
    def amax() -> str:
        with te_hal.use_backend("musa_emulator"):
            return str(ops.amax(torch.full((300, 300), -2.5)).item())

    assert amax() == "2.5"
    assert in_child(amax) == "2.5"
    assert amax() == "2.5"
