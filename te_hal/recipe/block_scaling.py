"""Float8BlockScaling: a scale per block of 128 neighbours, or of 128x128 elements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from te_hal.recipe.format import Format
from te_hal.recipe.recipe import MMParams, QParams, Recipe, check_format, check_is, refuse_attention
from te_hal.recipe.role_settings import check_backward_override, check_gemms, check_qparams, derived_qparams
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ElementFormat, ScalingMode

_DIMS = {"x_block_scaling_dim": "input", "w_block_scaling_dim": "weight", "grad_block_scaling_dim": "grad_output"}
_MODES = {1: ScalingMode.BLOCK_1X128, 2: ScalingMode.BLOCK_128X128}


@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """Scales per block, each from the block's own amax (docs/numerics.md, B1 to B5). Keeps no state.

    Attributes:
        use_f32_scales: scales of any fp32 value; False: powers of two. Start value:
            ``TE_HAL_FP8_BLOCK_SCALING_FP32_SCALES``. It takes effect however it is set.
        fp8_format: ``Format.E4M3``, or ``Format.HYBRID`` for E5M2 gradients.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 for blocks of 1x128, 2 for 128x128; of
            input and output, of the weight, and of gradients. At most one of them is 2.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: see :class:`MMParams`; True is required.
        fp8_dpa, fp8_mha: FP8 attention; True is refused.
        backward_override: None: the backward is quantized. ``"high_precision"``: dgrad and wgrad multiply the operands
            as they were before the cast; ``"dequantized"``: what the forward's codes stand for. Gradients stay plain
            then. Start value: ``TE_HAL_BACKWARD_OVERRIDE``.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: :class:`QParams` per role, derived from
            ``use_f32_scales`` and assignable afterwards.
    """

    use_f32_scales: bool = ENVIRONMENT.fp8_block_scaling_fp32_scales
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = ENVIRONMENT.backward_override
    fp8_quant_fwd_inp: QParams = field(init=False)
    fp8_quant_fwd_weight: QParams = field(init=False)
    fp8_quant_bwd_grad: QParams = field(init=False)

    family: ClassVar[str] = "float8_block_scaling"
    scaling_mode: ClassVar[ScalingMode] = ScalingMode.BLOCK_1X128

    def _assign(self, name: str, value: Any) -> None:  # noqa: ANN401 - validated below
        super()._assign(name, value)
        if name == "use_f32_scales":
            for qparams, derived in derived_qparams(self, power_2_scale=not value).items():
                super()._assign(qparams, derived)

    def _validate(self) -> None:
        check_is(self, "use_f32_scales", self.use_f32_scales, bool)
        check_format(self, self.fp8_format)
        self._check_dims()
        check_gemms(self, split_accumulator=True)
        refuse_attention(self, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        check_qparams(self)
        check_backward_override(self, self.backward_override)

    def _check_dims(self) -> None:
        for name in _DIMS:
            dim = getattr(self, name)
            if isinstance(dim, bool) or dim not in _MODES:
                raise ArgumentError(
                    f"Float8BlockScaling.{name}",
                    got=repr(dim),
                    accepted="1 (1x128 blocks), 2 (128x128 blocks)",
                    todo="correct the field",
                )
        square = [name for name in _DIMS if getattr(self, name) == 2]  # noqa: PLR2004 - dimensions
        if len(square) > 1:
            raise ArgumentError(
                f"Float8BlockScaling.{square[1]}",
                got=f"2 beside {square[0]}=2",
                accepted="at most one 2: products of two operands with 128x128 blocks are not part of the recipe",
                todo="leave one of them 1",
            )

    def mode_of(self, role: str) -> ScalingMode:
        """Blocks of a role; output goes with input, grad_input with grad_output."""
        if role.startswith("grad"):
            return _MODES[self.grad_block_scaling_dim]
        return _MODES[self.w_block_scaling_dim if role == "weight" else self.x_block_scaling_dim]

    def element_format(self, *, forward: bool) -> ElementFormat:
        """The 8-bit code of one direction."""
        return self.fp8_format.element_format(forward=forward)

    def __repr__(self) -> str:
        return (
            f"recipe_type={type(self).__name__}, format={self.fp8_format.name}, "
            f"use_f32_scales={self.use_f32_scales}, "
            f"fp8_quant_fwd_inp={self.fp8_quant_fwd_inp}, fp8_quant_fwd_weight={self.fp8_quant_fwd_weight}, "
            f"fp8_quant_bwd_grad={self.fp8_quant_bwd_grad}, x_block_scaling_dim={self.x_block_scaling_dim}, "
            f"w_block_scaling_dim={self.w_block_scaling_dim}, grad_block_scaling_dim={self.grad_block_scaling_dim}, "
            f"fp8_gemm_fprop={self.fp8_gemm_fprop}, fp8_gemm_dgrad={self.fp8_gemm_dgrad}, "
            f"fp8_gemm_wgrad={self.fp8_gemm_wgrad}, fp8_dpa={self.fp8_dpa}, fp8_mha={self.fp8_mha}, "
            f"backward_override={self.backward_override}"
        )
