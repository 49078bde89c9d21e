"""What is done with a product whose bias comes after it, in fp32: optional ops, and their compositions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import entry, register_composition
from te_hal.ops.pieces import in_one, row_pieces
from te_hal.schema.biased import BIAS_ACTIVATION_BWD, BIAS_ACTIVATION_FWD, BIAS_RESIDUAL
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Mapping

_FP32 = torch.float32
_enter_fwd = entry(BIAS_ACTIVATION_FWD)
_enter_bwd = entry(BIAS_ACTIVATION_BWD)
_enter_residual = entry(BIAS_RESIDUAL)


def bias_activation_fwd(
    input: torch.Tensor, bias: torch.Tensor, *, activation: str, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """An activation function of ``input + bias``, which are added in fp32; rounded once (V1, F4).

    Args:
        input: ``[..., F]``; fp32, fp16 or bf16.
        bias: ``[F]``; fp32, fp16 or bf16.
        activation: which function, of those that are not gated.
        out_dtype: fp32, fp16 or bf16; None: that of ``input``.

    Returns:
        A new tensor ``[..., F]``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_fwd(input, bias, activation, out_dtype)
    result: torch.Tensor = kernel(input, bias, activation=activation, out_dtype=out_dtype)
    return result


def bias_activation_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    bias: torch.Tensor,
    *,
    activation: str,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of :func:`bias_activation_fwd`; that of the bias sums the fp32 gradient, before its rounding (F4).

    Args:
        grad_output: gradient of the output, ``[..., F]``.
        input: as in the forward.
        bias: as in the forward.
        activation: as in the forward.
        bias_grad: also give the gradient of the bias.
        out_dtype: of the input's gradient: fp32, fp16 or bf16; None: that of ``input``.

    Returns:
        The input's gradient, ``[..., F]``; the bias's, ``[F]`` in its dtype, or None.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_bwd(grad_output, input, bias, activation, bias_grad, out_dtype)
    result: tuple[torch.Tensor, torch.Tensor | None] = kernel(
        grad_output, input, bias, activation=activation, bias_grad=bias_grad, out_dtype=out_dtype
    )
    return result


def bias_residual(input: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``residual + (input + bias)``, both sums in fp32, rounded once (G6).

    Args:
        input: ``[..., F]``; fp32, fp16 or bf16.
        bias: ``[F]``; fp32, fp16 or bf16.
        residual: of input's shape; fp32, fp16 or bf16.

    Returns:
        A new tensor of input's shape and residual's dtype.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    result: torch.Tensor = _enter_residual(input, bias, residual)(input, bias, residual)
    return result


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.shape[-1] else tensor.reshape(tensor.shape[:-1].numel(), 0)


def _compose_fwd(
    parts: Any,  # noqa: ANN401
    input: torch.Tensor,
    bias: torch.Tensor,
    *,
    activation: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    rows, added = _rows(input), bias.float()
    dtype = out_dtype or input.dtype
    if in_one(rows):
        result: torch.Tensor = parts.activation(rows + added, activation=activation, out_dtype=dtype)
        return result.view(input.shape)
    output = torch.empty(rows.shape, dtype=dtype, device=input.device)
    for piece in row_pieces(rows):
        output[piece] = parts.activation(rows[piece] + added, activation=activation, out_dtype=dtype)
    return output.view(input.shape)


def _compose_bwd(
    parts: Any,  # noqa: ANN401
    grad_output: torch.Tensor,
    input: torch.Tensor,
    bias: torch.Tensor,
    *,
    activation: str,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    grad, rows, added = _rows(grad_output), _rows(input), bias.float()
    rounded = torch.empty(rows.shape, dtype=out_dtype or input.dtype, device=input.device)
    sums = torch.zeros(bias.shape, dtype=_FP32, device=bias.device) if bias_grad else None
    for piece in row_pieces(rows):
        fp32 = parts.activation(grad[piece], rows[piece] + added, activation=activation, out_dtype=_FP32)
        rounded[piece] = fp32
        if sums is not None:
            sums += parts.bias_grad(fp32, out_dtype=_FP32)
    return rounded.view(input.shape), None if sums is None else sums.to(bias.dtype)


def _parts(call: Call) -> Mapping[str, Call]:
    """The activation of an fp32 sum or its gradient, and the gradient of the bias."""
    activation, device = call.flags["activation"], call.device
    if call.op == "bias_activation_fwd":
        flags = {"activation": activation, "out_dtype": call.flags["out_dtype"] or call.kinds["input"]}
        return {"activation": Call("activation_fwd", device, {"input": _FP32}, flags)}
    kinds = {"grad_output": call.kinds["grad_output"], "input": _FP32}
    parts = {"activation": Call("activation_bwd", device, kinds, {"activation": activation, "out_dtype": _FP32})}
    if call.flags["bias_grad"]:
        parts["bias_grad"] = Call("bias_grad", device, {"grad_output": _FP32}, {"out_dtype": _FP32})
    return parts


def _compose_residual(input: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    rows, onto, added = _rows(input), _rows(residual), bias.float()
    output = torch.empty(rows.shape, dtype=residual.dtype, device=residual.device)
    for piece in row_pieces(rows):
        torch.add(onto[piece], rows[piece] + added, out=output[piece])
    return output.view(input.shape)


register_composition("bias_activation_fwd", _compose_fwd, _parts)
register_composition("bias_activation_bwd", _compose_bwd, _parts)
register_composition("bias_residual", _compose_residual)
