"""Schemas of the activation family (optional ops: te_hal.ops.activation holds the composition)."""

from __future__ import annotations

from te_hal.schema.formats import FLOATS
from te_hal.schema.op import REQUIRED, Contract, Family, Flag, FlagType, Operand, OpSchema, Output, Rule, one_rounding

UNGATED = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")
ACTIVATIONS = UNGATED + GATED

_INPUT_SHAPE = dict.fromkeys(UNGATED, "... F") | dict.fromkeys(GATED, "... 2F")
_OUTPUT_SHAPE = dict.fromkeys(ACTIVATIONS, "... F")
_INPUT = Operand("input", FLOATS, _INPUT_SHAPE, "for gated kinds: first half activated, second half multiplies")
_FLAGS = (
    Flag("activation", FlagType.CHOICE, REQUIRED, "which function", ACTIVATIONS, keyed=True),
    Flag("limit", FlagType.OPTIONAL_FLOAT, None, "clamped_swiglu only; None: 7.0"),
    Flag("alpha", FlagType.OPTIONAL_FLOAT, None, "clamped_swiglu only; None: 1.702"),
    Flag("glu_linear_offset", FlagType.OPTIONAL_FLOAT, None, "clamped_swiglu only; None: 1.0"),
    Flag(
        "out_dtype",
        FlagType.OPTIONAL_DTYPE,
        None,
        "result dtype, float32 allowed; None: input's",
        FLOATS,
        keyed=True,
    ),
)
_RULES = (
    Rule(
        "activation == 'clamped_swiglu' or (limit is None and alpha is None and glu_linear_offset is None)",
        "limit, alpha and glu_linear_offset belong to clamped_swiglu",
    ),
)
_CONTRACT = Contract(
    ("V1", "V2", "V3"),
    "computed in fp32, one rounding",
    bound=one_rounding(1e-6),
)

ACTIVATION_FWD = OpSchema(
    name="activation_fwd",
    family=Family.ACTIVATION,
    summary="An activation function, gated or not, computed in fp32.",
    operands=(_INPUT,),
    flags=_FLAGS,
    outputs=(Output("output", _OUTPUT_SHAPE, "out_dtype|input", "last dimension halved for gated kinds"),),
    variant="activation",
    rules=_RULES,
    contract=_CONTRACT,
    optional=True,
)

ACTIVATION_BWD = OpSchema(
    name="activation_bwd",
    family=Family.ACTIVATION,
    summary="Gradient of activation_fwd with respect to its input, computed in fp32.",
    operands=(Operand("grad_output", FLOATS, _OUTPUT_SHAPE, "gradient of the output"), _INPUT),
    flags=_FLAGS,
    outputs=(Output("grad_input", "*input", "out_dtype|input", "shape of input"),),
    variant="activation",
    rules=_RULES,
    contract=_CONTRACT,
    optional=True,
)

SCHEMAS = (ACTIVATION_FWD, ACTIVATION_BWD)
