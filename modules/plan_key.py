"""PlanKey: everything that decides what a linear layer runs, the selection aside."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.quantization.float8_tensor import Float8Tensor
from te_hal.quantization.operand_formats import OperandFormat

if TYPE_CHECKING:
    from te_hal.quantization.operand_formats import Formats


class PlanKey(NamedTuple):
    """Everything a plan depends on, the selection aside.

    Attributes:
        formats: None without FP8.
        dtype: of the activations.
        bias_dtype: of the bias that fprop adds; None without one.
        bias_grad: the bias needs a gradient.
        main_grad_dtype: of the tensor that wgrad writes to; None where autograd gets the gradient.
        dgrad, wgrad: the input, the weight needs a gradient.
        input_is_quantized: the input comes quantized: as a Float8Tensor, or from the op before.
        grad_is_quantized: what comes before dgrad and wgrad quantizes the gradient, and sums it for the bias.
        keeps_original_input: the backward quantizes the input again.
        fp8_output, fp8_grad: output, gradient of the input leave as Float8Tensors.
        writes_into: fprop and dgrad write to tensors that exist, parts of a larger result.
    """

    formats: Formats | None
    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    bias_grad: bool
    main_grad_dtype: torch.dtype | None
    device: torch.device
    dgrad: bool
    wgrad: bool
    input_is_quantized: bool = False
    grad_is_quantized: bool = False
    keeps_original_input: bool = False
    fp8_output: bool = False
    fp8_grad: bool = False
    writes_into: bool = False

    @property
    def override(self) -> str | None:
        """What dgrad and wgrad multiply in place of codes (Formats.backward_override)."""
        return None if self.formats is None else self.formats.backward_override

    def format_of(self, role: str) -> OperandFormat | None:
        """What the operand of a role becomes; None where it stays as it is."""
        return None if self.formats is None else getattr(self.formats, role)

    def result_dtype(self, role: str) -> torch.dtype:
        """What the gemm writes that makes "output" or "grad_input".

        fp32 where delayed scaling quantizes the result next (docs/numerics.md, F1).
        """
        wanted = self.fp8_output if role == "output" else self.fp8_grad
        cast = self.format_of(role) if wanted else None
        return torch.float32 if cast is not None and cast.delayed else self.dtype


def plan_key(
    formats: Formats | None,
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    needs_dgrad: bool | None = None,
    input_is_quantized: bool = False,
    main_grad_dtype: torch.dtype | None = None,
    keeps_original_input: bool = False,
    fp8_output: bool = False,
    fp8_grad: bool = False,
    writes_into: bool = False,
) -> PlanKey:
    """Describe a call.

    Args:
        formats: what operands become (Fp8Module.formats); None without FP8.
        inp: in the activation dtype; under FP8 possibly a Float8Tensor.
        weight: in the activation dtype.
        bias: what fprop adds, in the activation dtype.
        needs_dgrad: whether something before needs the gradient of the input; None: whether ``inp`` does.
        input_is_quantized: the op before quantizes the input, under FP8; it does not where one cast is not all that
            is read of it.
        main_grad_dtype: where wgrad goes to main_grad.
        keeps_original_input: asked for; without effect where there is no wgrad, or the input is quantized already.
        fp8_output: asked for; without effect without FP8.
        fp8_grad: the same, and without effect where there is no dgrad.
        writes_into: fprop and dgrad get an ``out``.
    """
    dtype, fp8, grad = weight.dtype, formats is not None, torch.is_grad_enabled()
    dgrad = grad and (inp.requires_grad if needs_dgrad is None else needs_dgrad)
    wgrad = grad and weight.requires_grad
    override = None if formats is None else formats.backward_override
    fused = formats is not None and formats.input is not None and not (override == "high_precision" and wgrad)
    quantized = isinstance(inp, Float8Tensor) or (input_is_quantized and fused)
    # Under FP8 an fp32 bias is rounded to bf16, as in Transformer Engine (docs/numerics.md, G4).
    bias_dtype = torch.bfloat16 if fp8 and dtype == torch.float32 else dtype
    return PlanKey(
        formats=None if formats is None else _as_given(formats, inp),
        dtype=dtype,
        bias_dtype=None if bias is None else bias_dtype,
        bias_grad=grad and bias is not None and bias.requires_grad,
        main_grad_dtype=main_grad_dtype if wgrad else None,
        device=inp.device,
        dgrad=dgrad,
        wgrad=wgrad,
        input_is_quantized=quantized,
        keeps_original_input=keeps_original_input and fp8 and wgrad and not quantized and override is None,
        fp8_output=fp8_output and fp8,
        fp8_grad=fp8_grad and fp8 and dgrad,
        writes_into=writes_into,
    )


def _as_given(formats: Formats, inp: torch.Tensor) -> Formats:
    """The formats, the input's being what it has already."""
    if not isinstance(inp, Float8Tensor):
        return formats
    storage = inp.quantized_storage
    given = OperandFormat.of(storage.format, storage.mode)
    return formats._replace(input=given, hybrids=tuple(each for each in formats.hybrids if each[0] != "input"))
