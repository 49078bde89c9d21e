"""NVFP4BlockScaling: 4-bit codes, a scale per block of 16 under one of the tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from te_hal.recipe.format import Format
from te_hal.recipe.recipe import QParams, Recipe, check_is, refuse_attention
from te_hal.recipe.role_settings import check_backward_override
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.errors import ArgumentError, UnsupportedError
from te_hal.schema.formats import E2M1, ElementFormat, ScalingMode
from te_hal.schema.refusals import declare

_INPUT, _WEIGHT, _GRADIENT = _QPARAMS = ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")

#: What a field switches off: settings of roles.
_SWITCHES = {
    "disable_rht": ("random_hadamard_transform", (_INPUT, _GRADIENT)),
    "disable_stochastic_rounding": ("stochastic_rounding", (_GRADIENT,)),
    "disable_2d_quantization": ("fp4_2d_quantization", (_WEIGHT,)),
}
_SETTINGS = tuple(setting for setting, _ in _SWITCHES.values())

#: The settings of 4-over-6: values that Transformer Engine knows, its default, and the one that is taken.
_SCOPES = ("none", "weights", "activations", "all")
_FOUR_OVER_SIX = {
    "nvfp4_4over6": (_SCOPES, "none"),
    "nvfp4_4over6_e4m3_use_256": (_SCOPES, "all"),
    "nvfp4_4over6_err_mode": (("MAE", "MSE"), "MAE"),
}


_FOUR = "no op chooses between two scales per block, which 4-over-6 is"
_REFUSED = declare(
    "recipe.NVFP4BlockScaling",
    {"row_scaled_activation": False} | {name: default for name, (_, default) in _FOUR_OVER_SIX.items()},
    {"row_scaled_activation": "no op has a scale per row"} | dict.fromkeys(_FOUR_OVER_SIX, _FOUR),
)


@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """NVFP4 (docs/numerics.md, NV1 to NV8). Keeps no state.

    Activations and gradients have a scale per 16 neighbours, and what wgrad reads of them is Hadamard-transformed;
    weights have one per 16x16 square; gradients are rounded stochastically, by seeds that each quantization draws
    from torch's default generator, so that ``torch.manual_seed`` repeats a run.

    Attributes:
        disable_rht: no transform. Start value: ``TE_HAL_NVFP4_DISABLE_RHT``. With it, activations are bf16.
        disable_stochastic_rounding: round gradients to the nearest. Start value:
            ``TE_HAL_NVFP4_DISABLE_STOCHASTIC_ROUNDING``.
        disable_2d_quantization: weights, too, have a scale per 16 neighbours. Start value:
            ``TE_HAL_NVFP4_DISABLE_2D_QUANTIZATION``.
        row_scaled_activation: a scale per row in place of that of the tensor; True is refused.
        nvfp4_4over6, nvfp4_4over6_e4m3_use_256, nvfp4_4over6_err_mode: the choice between two scales per block;
            anything but Transformer Engine's defaults, which leave it off, is refused.
        fp4_format: ``Format.E2M1``.
        fp8_format: ``Format.E4M3``, of the blocks' scales.
        fp8_dpa, fp8_mha: FP8 attention; True is refused.
        backward_override: None: the backward is quantized. ``"high_precision"``: dgrad and wgrad multiply the operands
            as they were before the cast; ``"dequantized"``: what the forward's codes stand for. Gradients stay plain
            then. Start value: ``TE_HAL_BACKWARD_OVERRIDE``.
        fp4_quant_fwd_inp, fp4_quant_fwd_weight, fp4_quant_bwd_grad: :class:`QParams` per role, derived from the
            ``disable_`` fields and assignable afterwards.
    """

    disable_rht: bool = ENVIRONMENT.nvfp4_disable_rht
    disable_stochastic_rounding: bool = ENVIRONMENT.nvfp4_disable_stochastic_rounding
    disable_2d_quantization: bool = ENVIRONMENT.nvfp4_disable_2d_quantization
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = ENVIRONMENT.backward_override
    fp4_quant_fwd_inp: QParams = field(init=False)
    fp4_quant_fwd_weight: QParams = field(init=False)
    fp4_quant_bwd_grad: QParams = field(init=False)

    family: ClassVar[str] = "nvfp4"
    scaling_mode: ClassVar[ScalingMode] = ScalingMode.NVFP4

    def _assign(self, name: str, value: Any) -> None:  # noqa: ANN401 - validated below
        super()._assign(name, value)
        setting, roles = _SWITCHES.get(name, ("", ()))
        for role in roles:
            changed: dict[str, Any] = {setting: not value}
            super()._assign(role, replace(self.__dict__.get(role, QParams()), **changed))

    def _validate(self) -> None:
        for name in (*_SWITCHES, "row_scaled_activation"):
            check_is(self, name, getattr(self, name), bool)
        if self.row_scaled_activation:
            raise UnsupportedError(
                "NVFP4BlockScaling.row_scaled_activation",
                got="True",
                accepted=f"False: {_REFUSED['row_scaled_activation'].reason}",
                todo="leave it out; a tensor then has one scale above those of its blocks",
            )
        self._refuse_four_over_six()
        for name, wanted in (("fp4_format", Format.E2M1), ("fp8_format", Format.E4M3)):
            value = getattr(self, name)
            if value is not wanted:
                where = f"NVFP4BlockScaling.{name}"
                raise ArgumentError(where, got=str(value), accepted=str(wanted), todo="leave the field out")
        refuse_attention(self, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        check_backward_override(self, self.backward_override)
        for name in _QPARAMS:
            self._check_qparams(name)
        self._check_pairing()

    def _refuse_four_over_six(self) -> None:
        for name, (known, default) in _FOUR_OVER_SIX.items():
            value, where = getattr(self, name), f"NVFP4BlockScaling.{name}"
            if value not in known:
                accepted = ", ".join(map(repr, known))
                raise ArgumentError(where, got=repr(value), accepted=accepted, todo="correct the field")
            if value != default:
                raise UnsupportedError(
                    where,
                    got=repr(value),
                    accepted=f"{default!r}: {_REFUSED[name].reason}",
                    todo="leave the field out",
                )

    def _check_qparams(self, name: str) -> None:
        qparams = getattr(self, name)
        check_is(self, name, qparams, QParams)
        for setting in _SETTINGS:
            check_is(self, f"{name}.{setting}", getattr(qparams, setting), bool)
        for extra, default in (("power_2_scale", False), ("amax_epsilon", 0.0)):
            value = getattr(qparams, extra)
            if value != default:
                raise ArgumentError(
                    f"NVFP4BlockScaling.{name}.{extra}",
                    got=repr(value),
                    accepted=f"{default}: it belongs to 8-bit recipes",
                    todo="leave it out",
                )

    def _check_pairing(self) -> None:
        """Refuse settings that no op has, or under which a product would have no meaning."""
        wrong = None
        for name in _QPARAMS:
            qparams = getattr(self, name)
            square = qparams.fp4_2d_quantization
            if square and (qparams.random_hadamard_transform or qparams.stochastic_rounding):
                wrong = name, "fp4_2d_quantization alone: both copies of squares hold the same codes"
        if getattr(self, _WEIGHT).random_hadamard_transform:
            wrong = _WEIGHT, "no random_hadamard_transform: dgrad multiplies the weight with what is not transformed"
        transformed = [getattr(self, name).random_hadamard_transform for name in (_INPUT, _GRADIENT)]
        if transformed[0] is not transformed[1]:
            wrong = _GRADIENT, f"random_hadamard_transform as {_INPUT} has it: wgrad multiplies the two"
        if wrong is not None:
            name, accepted = wrong
            raise ArgumentError(
                f"NVFP4BlockScaling.{name}",
                got=repr(getattr(self, name)),
                accepted=accepted,
                todo="set disable_rht, disable_stochastic_rounding or disable_2d_quantization, which keep to that",
            )

    def qparams_of(self, role: str) -> QParams:
        """The settings of a role; output goes with input, grad_input with grad_output."""
        name = _GRADIENT if role.startswith("grad") else _WEIGHT if role == "weight" else _INPUT
        qparams: QParams = getattr(self, name)
        return qparams

    def mode_of(self, role: str) -> ScalingMode:
        """What is scaled in an operand of a role."""
        qparams = self.qparams_of(role)
        if qparams.fp4_2d_quantization:
            return ScalingMode.NVFP4_16X16
        return ScalingMode.NVFP4_HADAMARD if qparams.random_hadamard_transform else ScalingMode.NVFP4

    def element_format(self, *, forward: bool) -> ElementFormat:  # noqa: ARG002 - both alike
        """E2M1."""
        return E2M1

    def __repr__(self) -> str:
        switches = ", ".join(f"{name}={getattr(self, name)}" for name in _SWITCHES)
        qparams = ", ".join(f"{name}={getattr(self, name)}" for name in _QPARAMS)
        return (
            f"recipe_type={type(self).__name__}, {switches}, fp4_format={self.fp4_format.name}, "
            f"fp8_format={self.fp8_format.name}, fp8_dpa={self.fp8_dpa}, fp8_mha={self.fp8_mha}, "
            f"backward_override={self.backward_override}, {qparams}"
        )
