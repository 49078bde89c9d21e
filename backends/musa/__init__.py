"""Moore Threads GPUs through torch_musa: te_hal's kernels, and the vendor's matrix products through torch.

Never run on MUSA hardware. The same sources run on CPU tensors as backend musa_emulator and on NVIDIA GPUs as backend
cuda; what this folder adds (finding devices, streams, the choice of a product) runs in the tests against a stub of
torch_musa. `te-hal selftest --backend musa` checks it all on a device.
"""

from __future__ import annotations

import functools

from te_hal.backends.musa import device
from te_hal.backends.musa.gemm import GEMM
from te_hal.ffi.marshalling import kernels
from te_hal.ffi.native import Native
from te_hal.schema.backend import Backend, reads_blocks_along_the_sum


def create_backend() -> Backend:
    """The entry point that discovery calls. Opens no library, imports no torch_musa, and starts no device."""
    native = Native("musa", "musa", device.DEVICES)
    return Backend(
        name="musa",
        kernels=kernels(native, gemm=GEMM.gemm),
        serves=frozenset({"musa"}),
        default_for=frozenset({"musa"}),
        supports=functools.partial(GEMM.supports, native),
        usable=functools.partial(device.usable, native),
        gemm_copies=reads_blocks_along_the_sum,
        allocator=native,
        description="Moore Threads GPUs through torch_musa (never run on the hardware)",
    )
