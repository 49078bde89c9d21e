"""The oracle: every op in plain torch, each result traceable to a numbered rule of docs/numerics.md.

Casts, scales, amax and state updates are exact to the bit on every supported torch; gemm, norm and softmax keep
the bounds of their schemas. Nothing here is tied to a device, so whatever torch runs on can be served, and tensors
on the CPU are unasked. Arguments, shapes and errors are those of the functions in te_hal.ops with the kernels' names; a
kernel's docstring gives the rule it follows and what is peculiar to it.

    chunks         pieces of rows that stay in the cache
    amax           amax, compute_scale
    delayed_scale  update_delayed_scale
    cast           quantize, dequantize
    encode, decode values to codes and back
    block_cast     quantize, dequantize with a scale per block; block_scale, blocks: how scales are found and applied
    nvfp4_cast, nvfp4_values   the same in NVFP4; fp4_codes, hadamard, philox: what they are made of
    gemm, norm, softmax
    capability     what can be done
"""

from __future__ import annotations

from te_hal.backends.cpu_reference import amax, capability, cast, delayed_scale, gemm, norm, softmax
from te_hal.schema.backend import ANY_DEVICE, Backend, reads_blocks_along_the_sum

_KERNELS = (
    cast.quantize,
    cast.dequantize,
    amax.amax,
    amax.compute_scale,
    delayed_scale.update_delayed_scale,
    gemm.gemm,
    norm.layernorm_fwd,
    norm.layernorm_bwd,
    norm.rmsnorm_fwd,
    norm.rmsnorm_bwd,
    softmax.softmax_fwd,
    softmax.softmax_bwd,
)


def create_backend() -> Backend:
    """The entry point that discovery calls."""
    return Backend(
        name="cpu_reference",
        kernels={kernel.__name__: kernel for kernel in _KERNELS},
        serves=frozenset({ANY_DEVICE}),
        default_for=frozenset({"cpu"}),
        supports=capability.supports,
        gemm_copies=reads_blocks_along_the_sum,
        description="plain torch, exact casts, any device",
    )
