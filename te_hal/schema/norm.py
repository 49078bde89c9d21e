"""Schemas of the norm family."""

from __future__ import annotations

import torch

from te_hal.schema.formats import FLOAT32_MAX, FLOATS
from te_hal.schema.op import Contract, Family, Flag, FlagType, Operand, OpSchema, Output, Rule, one_rounding

_FP32 = (torch.float32,)
_INPUT = Operand("input", FLOATS, "... H", "normalised over its last dimension")
_GRAD_OUTPUT = Operand("grad_output", FLOATS, "... H", "gradient of the output")
_WEIGHT = Operand("weight", FLOATS, "H", "gamma")
_MEAN = Operand("mean", _FP32, "...", "mean of each row, from the forward")
_RSTD = Operand("rstd", _FP32, "...", "reciprocal standard deviation (or root mean square) of each row")
_EPSILON = Flag("epsilon", FlagType.FLOAT, 1e-5, "added to the variance (or mean square)")
_ZERO_CENTERED = Flag(
    "zero_centered_gamma",
    FlagType.BOOL,
    False,
    "gamma is stored minus one; the one is added in fp32",
    keyed=True,
)
_OUT_DTYPE = Flag(
    "out_dtype",
    FlagType.OPTIONAL_DTYPE,
    None,
    "result dtype, float32 allowed; None: input's",
    FLOATS,
    keyed=True,
)
_EPSILON_RANGE = (Rule(f"0 <= epsilon <= {FLOAT32_MAX!r}", "epsilon must be a number from 0 to fp32's largest"),)
_FORWARD = Contract(
    ("N1", "N2", "N3"),
    "fp32 statistics in any order, one rounding; rows whose mean is at most a few deviations",
    bound=one_rounding(1e-6),
)
_BACKWARD = Contract(
    ("N4",),
    "fp32 sums in any order, one rounding",
    bound=one_rounding(3e-6),
)
_GRAD_INPUT = Output("grad_input", "*input", "input", "shape and dtype of input")
_GRAD_WEIGHT = Output("grad_weight", "H", "weight", "shape and dtype of weight")

LAYERNORM_FWD = OpSchema(
    name="layernorm_fwd",
    family=Family.NORM,
    summary="(input - mean) * rstd * gamma + beta, in fp32.",
    operands=(_INPUT, _WEIGHT, Operand("bias", FLOATS, "H", "beta")),
    flags=(_EPSILON, _ZERO_CENTERED, _OUT_DTYPE),
    outputs=(
        Output("output", "*input", "out_dtype|input", "shape of input"),
        Output("mean", "...", torch.float32, "leading dimensions of input"),
        Output("rstd", "...", torch.float32, "leading dimensions of input"),
    ),
    rules=_EPSILON_RANGE,
    contract=_FORWARD,
)

LAYERNORM_BWD = OpSchema(
    name="layernorm_bwd",
    family=Family.NORM,
    summary="Gradients of layernorm_fwd.",
    operands=(_GRAD_OUTPUT, _INPUT, _MEAN, _RSTD, _WEIGHT),
    flags=(_ZERO_CENTERED,),
    outputs=(_GRAD_INPUT, _GRAD_WEIGHT, Output("grad_bias", "H", "weight", "shape and dtype of weight")),
    contract=_BACKWARD,
)

RMSNORM_FWD = OpSchema(
    name="rmsnorm_fwd",
    family=Family.NORM,
    summary="input * rstd * gamma, in fp32.",
    operands=(_INPUT, _WEIGHT),
    flags=(_EPSILON, _ZERO_CENTERED, _OUT_DTYPE),
    outputs=(
        Output("output", "*input", "out_dtype|input", "shape of input"),
        Output("rstd", "...", torch.float32, "leading dimensions of input"),
    ),
    rules=_EPSILON_RANGE,
    contract=_FORWARD,
)

RMSNORM_BWD = OpSchema(
    name="rmsnorm_bwd",
    family=Family.NORM,
    summary="Gradients of rmsnorm_fwd.",
    operands=(_GRAD_OUTPUT, _INPUT, _RSTD, _WEIGHT),
    flags=(_ZERO_CENTERED,),
    outputs=(_GRAD_INPUT, _GRAD_WEIGHT),
    contract=_BACKWARD,
)

SCHEMAS = (LAYERNORM_FWD, LAYERNORM_BWD, RMSNORM_FWD, RMSNORM_BWD)
