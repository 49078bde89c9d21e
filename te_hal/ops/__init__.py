"""The op interface: one function per op, checked by its schema, run by the backend in force.

Ops take and return plain tensors and ``QuantizedStorage``; none of them differentiates. The work is queued on the
current stream of the operands' device, as torch's own is, so results are ordered with what torch does there. What a
call may look like, what it writes in place and how exact its result is stands in ``te_hal.schema``; who runs it is
decided in ``te_hal.dispatch``, before anything is launched.
"""

import te_hal.ops.fused_compositions  # noqa: F401 - registers them
from te_hal.ops.activation import activation_bwd, activation_fwd
from te_hal.ops.amax import amax, compute_scale, update_delayed_scale
from te_hal.ops.bias_grad import bias_grad
from te_hal.ops.biased import bias_activation_bwd, bias_activation_fwd, bias_residual
from te_hal.ops.cast import dequantize, quantize
from te_hal.ops.delayed_scales import update_delayed_scales
from te_hal.ops.fused_activation import activation_bwd_quantize, activation_quantize
from te_hal.ops.fused_cast import bias_grad_quantize, quantize_current
from te_hal.ops.fused_norm import layernorm_quantize, rmsnorm_quantize
from te_hal.ops.gemm import gemm
from te_hal.ops.norm import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd
from te_hal.ops.softmax import softmax_bwd, softmax_fwd

__all__ = [
    "activation_bwd",
    "activation_bwd_quantize",
    "activation_fwd",
    "activation_quantize",
    "amax",
    "bias_activation_bwd",
    "bias_activation_fwd",
    "bias_grad",
    "bias_grad_quantize",
    "bias_residual",
    "compute_scale",
    "dequantize",
    "gemm",
    "layernorm_bwd",
    "layernorm_fwd",
    "layernorm_quantize",
    "quantize",
    "quantize_current",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "rmsnorm_quantize",
    "softmax_bwd",
    "softmax_fwd",
    "update_delayed_scale",
    "update_delayed_scales",
]
