"""Kernels in Python: each makes its outputs and one native call; what the schema has checked is not checked again.

Every function has the signature of its op's schema behind a first argument, the Native that it runs on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.ffi.marshalling import (
    activation,
    amax,
    biased,
    cast,
    fused_activation,
    fused_cast,
    fused_norm,
    gemm,
    norm,
    softmax,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from te_hal.ffi.native import Native

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    cast.quantize,
    cast.dequantize,
    amax.amax,
    amax.compute_scale,
    amax.update_delayed_scale,
    amax.update_delayed_scales,
    gemm.gemm,
    gemm.bias_grad,
    norm.layernorm_fwd,
    norm.layernorm_bwd,
    norm.rmsnorm_fwd,
    norm.rmsnorm_bwd,
    softmax.softmax_fwd,
    softmax.softmax_bwd,
    activation.activation_fwd,
    activation.activation_bwd,
    fused_cast.quantize_current,
    fused_cast.bias_grad_quantize,
    fused_norm.layernorm_quantize,
    fused_norm.rmsnorm_quantize,
    fused_activation.activation_quantize,
    fused_activation.activation_bwd_quantize,
    biased.bias_activation_fwd,
    biased.bias_activation_bwd,
    biased.bias_residual,
)


def kernels(native: Native, **instead: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Every kernel by the name of its op, bound to a library.

    Args:
        native: the library.
        instead: functions of the same kind that a backend has for single ops, by name.
    """
    functions = {function.__name__: function for function in _FUNCTIONS} | instead
    return {name: native.bind(function) for name, function in functions.items()}
