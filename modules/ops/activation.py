"""Activation: what all activation ops share, and the ops whose formula te_hal.ops has, gated ones elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from te_hal.modules.activation_dtype import activation_dtype, plain_input
from te_hal.modules.activation_stage import ActivationKey, is_gated
from te_hal.modules.ops.activation_function import ActivationFunction, make_activation_plan
from te_hal.modules.ops.input_checks import check_input, wrong_size
from te_hal.modules.ops.operation import BasicOperation, Part
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.recompute import recomputable
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.flags import check_flags

if TYPE_CHECKING:
    import torch

    from te_hal.modules.ops.activation_function import ActivationPlan


class Activation(BasicOperation):
    """Base of activation ops, computed in fp32 and rounded once (docs/numerics.md, V1 to V3).

    Between two BasicLinear in a Sequential, under FP8, the forward quantizes its result for the product behind it and
    the backward the gradient for the one before (F2, F3, F5).

    Args:
        cache_quantized_input: keep the input for backward in FP8 (E4M3, scaled by its own amax): a byte an element,
            and a gradient of the rounded input. Such an op runs by itself.

    Attributes:
        activation: name of the formula among the ops of te_hal.ops.
    """

    part: ClassVar[Part | None] = Part.FRONT
    quantizes_gradient: ClassVar[bool] = True
    activation: ClassVar[str]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        check_flags(self.label, {"cache_quantized_input": cache_quantized_input})
        self.cache_quantized_input = cache_quantized_input
        self._plans: PlanCache[ActivationKey, ActivationPlan] = PlanCache(self._make_plan)

    @property
    def gated(self) -> bool:
        """Whether it takes twice as many values as it gives."""
        return is_gated(self.activation)

    def may_join(self) -> bool:
        """Unless the input is kept in a form of its own."""
        return not self.cache_quantized_input

    def key(self, dtype: torch.dtype, device: torch.device) -> ActivationKey:
        """What is computed, and where."""
        return ActivationKey(self.activation, self._settings(), dtype, device, adds_bias=False, bias_grad=False)

    def _settings(self) -> tuple[tuple[str, float], ...]:
        """Of the formula, as pairs."""
        return ()

    @staticmethod
    def _make_plan(key: ActivationKey) -> ActivationPlan:
        return make_activation_plan(key)

    @run_eagerly
    @recomputable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply it.

        Args:
            input: ``[..., F]``, of gated kinds ``[..., 2F]``; a quantized one is dequantized.

        Returns:
            ``[..., F]`` in the activation dtype.

        Raises:
            ArgumentTypeError, ArgumentError: no tensor; an odd last size for a gated kind; a dtype that none takes.
        """
        return self._activate(input)

    def _activate(self, input: torch.Tensor) -> torch.Tensor:
        check_input(self.label, input)
        if self.gated and input.shape[-1] % 2:
            raise wrong_size(self.label, tuple(input.shape), input.shape[-1] + 1, "2 x the size of the result")
        dtype = activation_dtype(self.label, input)
        given = plain_input(input, dtype).contiguous()
        plan = self._plans.get(self.key(dtype, input.device))
        output: torch.Tensor = ActivationFunction.apply(given, plan, self.cache_quantized_input, self.label)  # type: ignore[no-untyped-call]
        return output


class GELU(Activation):
    """Gaussian error linear unit, the tanh form."""

    activation = "gelu"


class QGELU(Activation):
    """Quick GELU, ``x * sigmoid(1.702 * x)``."""

    activation = "qgelu"


class ReLU(Activation):
    """Rectified linear unit."""

    activation = "relu"


class SReLU(Activation):
    """Squared ReLU."""

    activation = "srelu"


class SiLU(Activation):
    """Sigmoid linear unit, ``x * sigmoid(x)``."""

    activation = "silu"


class GLU(Activation):
    """Gated by a sigmoid: the first half of the last dimension goes through it, the second multiplies."""

    activation = "glu"


class GEGLU(Activation):
    """Gated by GELU."""

    activation = "geglu"


class QGEGLU(Activation):
    """Gated by quick GELU."""

    activation = "qgeglu"


class ReGLU(Activation):
    """Gated by ReLU."""

    activation = "reglu"


class SReGLU(Activation):
    """Gated by squared ReLU."""

    activation = "sreglu"
