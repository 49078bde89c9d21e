"""The softmax family: scaled, masked softmax over the last dimension, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import entry
from te_hal.schema.softmax import SOFTMAX_BWD, SOFTMAX_FWD

if TYPE_CHECKING:
    import torch

_enter_softmax_fwd = entry(SOFTMAX_FWD)
_enter_softmax_bwd = entry(SOFTMAX_BWD)


def softmax_fwd(
    input: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    causal: str = "none",
    window: tuple[int, int] = (-1, -1),
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``softmax(scale * input)`` over the visible keys, in fp32; a row with nothing to see gives zeros (X1 to X4).

    Args:
        input: scores ``[..., Sq, Sk]``; fp32, fp16 or bf16.
        mask: bool, broadcasts to ``input``; True hides a key.
        scale: multiplies the scores in fp32.
        causal: ``"none"``; ``"top_left"``: query i sees keys up to i; ``"bottom_right"``: up to i + (Sk - Sq).
        window: keys visible left and right of the diagonal that ``causal`` aligns ("none": top left); -1: all. With a
            causal mask nothing right of the diagonal is visible, whatever the second number says.
        out_dtype: fp32, fp16 or bf16; None: that of ``input``.

    Returns:
        Probabilities, a new tensor of input's shape.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_softmax_fwd(input, mask, scale, causal, window, out_dtype)
    result: torch.Tensor = kernel(input, mask=mask, scale=scale, causal=causal, window=window, out_dtype=out_dtype)
    return result


def softmax_bwd(
    grad_output: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float = 1.0,
    causal: str = "none",
    window: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """``scale * output * (grad_output - sum(grad_output * output))``, in fp32; masks need no second mention (X4).

    Args:
        grad_output: gradient of the probabilities ``[..., Sq, Sk]``; fp32, fp16 or bf16.
        output: probabilities from the forward, the same shape.
        scale: as in the forward.
        causal: as in the forward, or ``"none"``. Keys that it hides have gradient 0; neither operand is read there.
        window: the same.

    Returns:
        Gradient of the scores, a new tensor of grad_output's shape and dtype.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_softmax_bwd(grad_output, output, scale, causal, window)
    result: torch.Tensor = kernel(grad_output, output, scale=scale, causal=causal, window=window)
    return result
