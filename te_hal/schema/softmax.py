"""Schemas of the softmax family."""

from __future__ import annotations

import torch

from te_hal.schema.formats import FLOATS
from te_hal.schema.op import Contract, Family, Flag, FlagType, Operand, OpSchema, Output, one_rounding

#: No causal mask; query i sees keys up to i; query i sees keys up to i + (Sk - Sq).
CAUSAL = ("none", "top_left", "bottom_right")

_CONTRACT = Contract(
    ("X1", "X2", "X3", "X4"),
    "fp32 exponentials and sums, one rounding; scaled scores within +-16, whose fp32 rounding enters the exponent",
    bound=one_rounding(2e-6),
)
_SCALE = Flag("scale", FlagType.FLOAT, 1.0, "multiplies the input before the exponential, in fp32")

_WINDOW = Flag(
    "window",
    FlagType.WINDOW,
    (-1, -1),
    "keys visible left and right of the diagonal that `causal` aligns (none: top left); -1: all",
)

SOFTMAX_FWD = OpSchema(
    name="softmax_fwd",
    family=Family.SOFTMAX,
    summary="Scaled, masked softmax over the last dimension. A row with nothing to see gives zeros.",
    operands=(
        Operand("input", FLOATS, "... Sq Sk", "scores"),
        Operand("mask", (torch.bool,), "<input", "True hides a key; broadcasts to input", optional=True),
    ),
    keyword_operands=frozenset({"mask"}),
    flags=(
        _SCALE,
        Flag("causal", FlagType.CHOICE, "none", "causal mask and its alignment", CAUSAL, keyed=True),
        _WINDOW,
        Flag("out_dtype", FlagType.OPTIONAL_DTYPE, None, "result dtype; None: input's", FLOATS, keyed=True),
    ),
    outputs=(Output("output", "*input", "out_dtype|input", "probabilities"),),
    contract=_CONTRACT,
)

SOFTMAX_BWD = OpSchema(
    name="softmax_bwd",
    family=Family.SOFTMAX,
    summary="scale * output * (grad_output - sum(grad_output * output)), 0 for keys that the forward hid.",
    operands=(
        Operand("grad_output", FLOATS, "... Sq Sk", "gradient of the probabilities"),
        Operand("output", FLOATS, "... Sq Sk", "probabilities from the forward"),
    ),
    flags=(
        _SCALE,
        Flag("causal", FlagType.CHOICE, "none", "the forward's; what it hid need not be read", CAUSAL, keyed=True),
        _WINDOW,
    ),
    outputs=(Output("grad_input", "*output", "grad_output", "gradient of the scores"),),
    contract=_CONTRACT,
)

SCHEMAS = (SOFTMAX_FWD, SOFTMAX_BWD)
