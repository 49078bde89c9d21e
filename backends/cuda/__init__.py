"""The MUSA kernels on NVIDIA GPUs, and NVIDIA's own matrix products through torch.

It proves the interface and measures it: the kernels are those of backend musa, compiled by nvcc.
"""

from __future__ import annotations

import functools

from te_hal.backends.cuda import device
from te_hal.backends.cuda.gemm import GEMM, gemm_copies
from te_hal.ffi.marshalling import kernels
from te_hal.ffi.native import Native
from te_hal.schema.backend import Backend

# cuDNN's kernel first: on an H200, torch's flash kernel took 1751 us where Transformer Engine's attention took 1016.
_SDPA_KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def create_backend() -> Backend:
    """The entry point that discovery calls. Opens no library and starts no device."""
    native = Native("cuda", "cuda", device.DEVICES)
    return Backend(
        name="cuda",
        kernels=kernels(native, gemm=GEMM.gemm),
        serves=frozenset({"cuda"}),
        default_for=frozenset({"cuda"}),
        supports=functools.partial(GEMM.supports, native),
        usable=functools.partial(device.usable, native),
        gemm_copies=gemm_copies,
        sdpa_kernels=_SDPA_KERNELS,
        allocator=native,
        description="the MUSA kernels on NVIDIA GPUs, matrix products by torch",
    )
