"""Libraries for tests: the host library with the orders its emulated device knows, and stubs compiled for one test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import native_stub
import pytest
import torch
from emulator_orders import ORDERS
from host_library import host_library_path
from native_table import Library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _one_thread_of_torch() -> Iterator[None]:
    """Torch's threads wait busily, beside those of the emulator."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def built_library() -> Library:
    """The host library, compiled unless the cache has it. KERNEL_TEST_SANITIZER chooses a sanitizer's build."""
    return Library(host_library_path())


@pytest.fixture
def host_library(built_library: Library) -> Library:
    """The host library with threads in sequence."""
    built_library.configure_emulator(*ORDERS["in_sequence"])
    return built_library


@pytest.fixture(params=ORDERS)
def library(request: pytest.FixtureRequest, built_library: Library) -> Library:
    """The host library, once in every order."""
    built_library.configure_emulator(*ORDERS[request.param])
    return built_library


@pytest.fixture
def stub(tmp_path: Path) -> Callable[..., Path]:
    """Builds a stub library; arguments as native_stub.build without the folder."""
    native_stub.need()
    return lambda name="libstub.so", **choices: native_stub.build(tmp_path, name, **choices)
