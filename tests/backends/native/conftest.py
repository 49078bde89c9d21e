"""Every test here runs on the emulator and, where there is an NVIDIA GPU, on backend cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import native_backends
import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from native_backends import NativeBackend


@pytest.fixture(autouse=True, scope="session")
def _one_thread_of_torch() -> Iterator[None]:
    """Torch's threads wait busily, beside those of the emulator."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: A machine without a GPU has no tests for one, rather than hundreds of skips.
GPU = ["cuda"] if torch.cuda.is_available() else []
collect_ignore = [] if GPU else ["test_graphs.py", "test_streams.py"]


@pytest.fixture(params=["emulator", *GPU])
def native(request: pytest.FixtureRequest) -> NativeBackend:
    """Each backend."""
    return getattr(native_backends, request.param)()


@pytest.fixture(params=[*native_backends.ORDERS, *GPU])
def ordered(request: pytest.FixtureRequest) -> Iterator[NativeBackend]:
    """The emulator in each of its orders, and cuda."""
    if request.param == "cuda":
        yield native_backends.cuda()
        return
    yield native_backends.emulator(request.param)
    native_backends.emulator()
