"""The MUSA kernels on CPU tensors: the same sources, built for the host, on an emulated device.

It shows what the kernels compute, and catches kernels that break the devices' rules; how long they take says nothing.
A substitute is chosen by name only: ``te_hal.set_backend("musa_emulator")``.
"""

from __future__ import annotations

import functools

from te_hal.ffi.capability import ask
from te_hal.ffi.devices import HOST
from te_hal.ffi.marshalling import kernels
from te_hal.ffi.native import Native
from te_hal.schema.backend import Backend, reads_blocks_along_the_sum


def create_backend() -> Backend:
    """The entry point that discovery calls. Opens no library."""
    native = Native("musa_emulator", "host", HOST)
    return Backend(
        name="musa_emulator",
        kernels=kernels(native),
        serves=frozenset({"cpu"}),
        supports=functools.partial(ask, native),
        usable=native.opens,
        gemm_copies=reads_blocks_along_the_sum,
        allocator=native,
        description="the MUSA kernels on an emulated device, for CPU tensors; chosen by name only",
    )
