"""Schemas of what is done with a product whose bias comes after it, in fp32 (optional; te_hal.ops has compositions)."""

from __future__ import annotations

from te_hal.schema.activation import UNGATED
from te_hal.schema.formats import FLOATS
from te_hal.schema.op import REQUIRED, Contract, Family, Flag, FlagType, Operand, OpSchema, Output, one_rounding

_INPUT = Operand("input", FLOATS, "... F", "a product, rounded without its bias")
_BIAS = Operand("bias", FLOATS, "F", "added to every row, in fp32")
_ACTIVATION = Flag("activation", FlagType.CHOICE, REQUIRED, "which function", UNGATED, keyed=True)
_OUT_DTYPE = Flag(
    "out_dtype",
    FlagType.OPTIONAL_DTYPE,
    None,
    "result dtype, float32 allowed; None: input's",
    FLOATS,
    keyed=True,
)

BIAS_ACTIVATION_FWD = OpSchema(
    name="bias_activation_fwd",
    family=Family.FUSED,
    summary="An activation function of input + bias; the sum is fp32.",
    operands=(_INPUT, _BIAS),
    flags=(_ACTIVATION, _OUT_DTYPE),
    outputs=(Output("output", "*input", "out_dtype|input", "shape of input"),),
    contract=Contract(("V1", "F4"), "computed in fp32, one rounding", bound=one_rounding(1e-6)),
    optional=True,
)

BIAS_ACTIVATION_BWD = OpSchema(
    name="bias_activation_bwd",
    family=Family.FUSED,
    summary="Gradient of bias_activation_fwd with respect to its input and, where asked for, its bias.",
    operands=(Operand("grad_output", FLOATS, "... F", "gradient of the output"), _INPUT, _BIAS),
    flags=(
        _ACTIVATION,
        Flag("bias_grad", FlagType.BOOL, False, "also sum the fp32 gradient over its rows", keyed=True),
        _OUT_DTYPE,
    ),
    outputs=(
        Output("grad_input", "*input", "out_dtype|input", "shape of input"),
        Output("grad_bias", "F", "bias", "sum over rows of the fp32 gradient", when="bias_grad"),
    ),
    contract=Contract(("V1", "F4", "G5"), "computed in fp32, one rounding", bound=one_rounding(3e-6)),
    optional=True,
)

BIAS_RESIDUAL = OpSchema(
    name="bias_residual",
    family=Family.FUSED,
    summary="residual + (input + bias), both sums in fp32, rounded once.",
    operands=(_INPUT, _BIAS, Operand("residual", FLOATS, "*input", "what the product is added to")),
    flags=(),
    outputs=(Output("output", "*input", "residual", "shape of input"),),
    contract=Contract(("G6",), "two IEEE additions and one rounding", exact=True),
    optional=True,
)

SCHEMAS = (BIAS_ACTIVATION_FWD, BIAS_ACTIVATION_BWD, BIAS_RESIDUAL)
