"""Float8CurrentScaling: one scale per tensor, from that tensor's own amax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from te_hal.recipe.format import Format
from te_hal.recipe.recipe import MMParams, QParams, Recipe, check_format, check_is, refuse_attention
from te_hal.recipe.role_settings import check_backward_override, check_gemms, check_qparams, derived_qparams
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.formats import ElementFormat, ScalingMode


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """Current scaling (docs/numerics.md, S1-S4).

    Attributes:
        use_power_2_scales: round all scales down to powers of two. Start value:
            ``TE_HAL_FP8_CURRENT_SCALING_POWER_2_SCALES``. It takes effect however it is set.
        fp8_format: ``Format.HYBRID`` (E4M3 forward, E5M2 backward) or ``Format.E4M3``.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: see :class:`MMParams`.
        fp8_dpa, fp8_mha: FP8 attention; True is refused.
        backward_override: None: the backward is quantized. ``"high_precision"``: dgrad and wgrad multiply the operands
            as they were before the cast; ``"dequantized"``: what the forward's codes stand for. Gradients stay plain
            then. Start value: ``TE_HAL_BACKWARD_OVERRIDE``.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: :class:`QParams` per role, derived from
            ``use_power_2_scales`` and assignable afterwards; assigning ``use_power_2_scales`` changes their
            ``power_2_scale`` and nothing else.
    """

    use_power_2_scales: bool = ENVIRONMENT.fp8_current_scaling_power_2_scales
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = ENVIRONMENT.backward_override
    fp8_quant_fwd_inp: QParams = field(init=False)
    fp8_quant_fwd_weight: QParams = field(init=False)
    fp8_quant_bwd_grad: QParams = field(init=False)

    family: ClassVar[str] = "float8_current_scaling"
    scaling_mode: ClassVar[ScalingMode] = ScalingMode.TENSOR

    def _assign(self, name: str, value: Any) -> None:  # noqa: ANN401 - validated below
        super()._assign(name, value)
        if name == "use_power_2_scales":
            for qparams, derived in derived_qparams(self, power_2_scale=value).items():
                super()._assign(qparams, derived)

    def _validate(self) -> None:
        check_is(self, "use_power_2_scales", self.use_power_2_scales, bool)
        check_format(self, self.fp8_format)
        refuse_attention(self, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        check_gemms(self)
        check_qparams(self)
        check_backward_override(self, self.backward_override)

    def element_format(self, *, forward: bool) -> ElementFormat:
        """The 8-bit code of one direction."""
        return self.fp8_format.element_format(forward=forward)

    def __repr__(self) -> str:
        return (
            f"recipe_type={type(self).__name__}, format={self.fp8_format.name}, "
            f"use_power_2_scales={self.use_power_2_scales}, "
            f"fp8_quant_fwd_inp={self.fp8_quant_fwd_inp}, fp8_quant_fwd_weight={self.fp8_quant_fwd_weight}, "
            f"fp8_quant_bwd_grad={self.fp8_quant_bwd_grad}, "
            f"fp8_gemm_fprop={self.fp8_gemm_fprop}, fp8_gemm_dgrad={self.fp8_gemm_dgrad}, "
            f"fp8_gemm_wgrad={self.fp8_gemm_wgrad}, fp8_dpa={self.fp8_dpa}, fp8_mha={self.fp8_mha}, "
            f"backward_override={self.backward_override}"
        )
