"""Gated activations with settings, or with a number for each row: SwiGLU and its kin."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from te_hal.dispatch import current_memo
from te_hal.modules.activation_stage import check_activation
from te_hal.modules.arguments import check_size
from te_hal.modules.ops.activation import Activation, SReLU
from te_hal.modules.ops.activation_function import ActivationPlan
from te_hal.modules.ops.input_checks import check_beside, wrong_size
from te_hal.modules.recompute import recomputable
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.errors import ArgumentError
from te_hal.schema.refusals import Refusal, declare, refuse

if TYPE_CHECKING:
    from te_hal.modules.activation_stage import ActivationKey

_REFUSED: dict[str, Refusal] = {}
for _name in ("ScaledSReLU", "ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"):
    _REFUSED = declare(
        f"ops.{_name}",
        {"activation_recompute_in_mlp": False},
        {"activation_recompute_in_mlp": "ops inside of te.checkpoint are recomputed, whichever they are"},
    )

_SITUGLU = "situglu"


class _Interleaved(Activation):
    """A gated activation whose input may come as blocks of either half in turn.

    Args:
        cache_quantized_input: as :class:`Activation`.
        glu_interleave_size: neighbours of a block; None: the halves lie one behind the other. With it the op runs by
            itself.
    """

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        size = glu_interleave_size
        self.glu_interleave_size = None if size is None else check_size(f"{self.label}: glu_interleave_size", size)

    def may_join(self) -> bool:
        """Where the halves lie as kernels read them."""
        return super().may_join() and self.glu_interleave_size is None

    def _activate(self, input: torch.Tensor) -> torch.Tensor:
        size = self.glu_interleave_size
        if size is None or not isinstance(input, torch.Tensor) or not input.dim():
            return super()._activate(input)
        width = input.shape[-1]
        if width % (2 * size):
            wanted = -(-width // (2 * size)) * 2 * size
            raise wrong_size(self.label, tuple(input.shape), wanted, "a multiple of 2 x glu_interleave_size")
        blocks = input.reshape(*input.shape[:-1], width // (2 * size), 2, size)
        return super()._activate(blocks.transpose(-3, -2).reshape(input.shape))


class SwiGLU(_Interleaved):
    """Gated by SiLU: the first half of the last dimension goes through it, the second multiplies."""

    activation = "swiglu"


class ClampedSwiGLU(_Interleaved):
    """SwiGLU of clamped halves (docs/numerics.md, V3).

    Args:
        limit: of both halves.
        alpha: factor of the gate inside of the sigmoid.
        glu_linear_offset: added to the second half.
        cache_quantized_input, glu_interleave_size: as SwiGLU.
    """

    activation = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        given = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        check_activation(self.label, self.activation, given)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def _settings(self) -> tuple[tuple[str, float], ...]:
        return (("alpha", self.alpha), ("glu_linear_offset", self.glu_linear_offset), ("limit", self.limit))


class SiTUGLU(_Interleaved):
    """``beta1 * tanh(a / beta1) * sigmoid(a) * beta2 * tanh(b / beta2)``, in fp32, rounded once; plain torch.

    Args:
        beta1: bound of the gate.
        beta2: bound of the second half.
        cache_quantized_input, glu_interleave_size: as SwiGLU.
    """

    activation = _SITUGLU
    part = None

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not beta > 0:
                raise ArgumentError(
                    f"{self.label}: {name}", got=repr(beta), accepted="a number above 0", todo="correct it"
                )
        self.beta1, self.beta2 = beta1, beta2

    @property
    def gated(self) -> bool:
        """Yes."""
        return True

    def _settings(self) -> tuple[tuple[str, float], ...]:
        return (("beta1", self.beta1), ("beta2", self.beta2))

    @staticmethod
    def _make_plan(key: ActivationKey) -> ActivationPlan:
        (_, beta1), (_, beta2) = key.parameters
        forward = partial(_situglu, beta1=beta1, beta2=beta2)
        return ActivationPlan(key, current_memo(), forward, partial(_situglu_backward, beta1=beta1, beta2=beta2))


def _situglu(input: torch.Tensor, beta1: float, beta2: float) -> torch.Tensor:
    with torch.autocast(input.device.type, enabled=False):
        gate, linear = input.float().chunk(2, dim=-1)
        wide = beta1 * torch.tanh(gate / beta1) * torch.sigmoid(gate) * (beta2 * torch.tanh(linear / beta2))
        return wide.to(input.dtype)


def _situglu_backward(grad_output: torch.Tensor, input: torch.Tensor, beta1: float, beta2: float) -> torch.Tensor:
    wide = input.float().requires_grad_()
    with torch.enable_grad():
        result = _situglu(wide, beta1, beta2)
    (grad,) = torch.autograd.grad(result, wide, grad_output.float())
    return grad.to(input.dtype)


class _Scaled(Activation):
    """An activation whose rows are multiplied by numbers that come as an extra input: for rows of experts.

    Its ``forward(input, scales)`` takes ``scales [...]``, one for each row of ``[..., F or 2F]``, and multiplies in
    the activation dtype. It runs by itself.
    """

    num_extra_inputs = 1
    part = None

    @run_eagerly
    @recomputable
    def forward(self, input: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # one more
        """The activation of ``input``, each row times its number.

        Raises:
            ArgumentTypeError, ArgumentError: as of the activation; ``scales`` that do not fit.
        """
        output = self._activate(input)
        scales = scales.to(output.dtype) if isinstance(scales, torch.Tensor) else scales
        check_beside(self.label, "scales", scales, output, tuple(output.shape[:-1]))
        return output * scales.unsqueeze(-1)


class ScaledSReLU(_Scaled, SReLU):
    """Squared ReLU, each row times a number."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        refuse("ScaledSReLU", {"activation_recompute_in_mlp": activation_recompute_in_mlp}, _REFUSED)
        super().__init__()


class ScaledSwiGLU(_Scaled, SwiGLU):
    """SwiGLU, each row times a number."""

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        refuse("ScaledSwiGLU", {"activation_recompute_in_mlp": activation_recompute_in_mlp}, _REFUSED)
        SwiGLU.__init__(self, glu_interleave_size=glu_interleave_size)


class ScaledSiTUGLU(_Scaled, SiTUGLU):
    """SiTUGLU, each row times a number."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        refuse("ScaledSiTUGLU", {"activation_recompute_in_mlp": activation_recompute_in_mlp}, _REFUSED)
        SiTUGLU.__init__(self, beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size)


class ScaledClampedQGeGLU(_Scaled, ClampedSwiGLU):
    """ClampedSwiGLU, each row times a number."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        refuse("ScaledClampedQGeGLU", {"activation_recompute_in_mlp": activation_recompute_in_mlp}, _REFUSED)
        ClampedSwiGLU.__init__(
            self,
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
            glu_interleave_size=glu_interleave_size,
        )
