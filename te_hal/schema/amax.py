"""Schemas of the amax family: absolute maxima, and the scales that come from them."""

from __future__ import annotations

import torch

from te_hal.schema.formats import FLOAT32_MAX, FLOATS
from te_hal.schema.op import REQUIRED, Contract, Family, Flag, FlagType, Operand, OpSchema, Output, Rule

_FP32 = (torch.float32,)
_FP8_MAX = Rule(f"0 < fp8_max <= {FLOAT32_MAX!r}", "fp8_max must be positive and at most fp32's largest")

AMAX = OpSchema(
    name="amax",
    family=Family.AMAX,
    summary="Largest magnitude of a tensor, in fp32. NaN elements are ignored, infinities are not.",
    operands=(
        Operand("input", FLOATS, "...", "any shape; of an empty tensor the result is 0"),
        Operand("out", _FP32, "1", "becomes max(out, amax)", optional=True, written=True),
    ),
    keyword_operands=frozenset({"out"}),
    flags=(),
    outputs=(Output("amax", "1", torch.float32, "shape [1]; `out` itself where given"),),
    contract=Contract(("A1",), "a maximum has no rounding", exact=True),
)

COMPUTE_SCALE = OpSchema(
    name="compute_scale",
    family=Family.AMAX,
    summary="The scale that maps amax to the largest finite code.",
    operands=(Operand("amax", _FP32, "...", "absolute maxima, any shape"),),
    flags=(
        Flag("fp8_max", FlagType.FLOAT, REQUIRED, "largest finite magnitude of the format"),
        Flag("epsilon", FlagType.FLOAT, 0.0, "floor of amax"),
        Flag("power_of_2", FlagType.BOOL, False, "round the scale down to a power of two"),
        Flag("value_for_inf", FlagType.FLOAT, FLOAT32_MAX, "what an overflowing quotient becomes"),
    ),
    outputs=(Output("scale", "*amax", torch.float32, "same shape as amax"),),
    rules=(
        _FP8_MAX,
        Rule(f"0 <= epsilon <= {FLOAT32_MAX!r}", "epsilon must be a number from 0 to fp32's largest"),
        Rule(f"0 < value_for_inf <= {FLOAT32_MAX!r}", "value_for_inf must be positive and at most fp32's largest"),
    ),
    contract=Contract(("S1", "S2", "S3", "S4"), "one IEEE division", exact=True),
)

UPDATE_DELAYED_SCALE = OpSchema(
    name="update_delayed_scale",
    family=Family.AMAX,
    summary="Roll the amax history of n tensors and renew their scales, all in place.",
    operands=(
        Operand(
            "amax_history",
            _FP32,
            "L N",
            "row 0 is the running amax, row L-1 the newest past one",
            written=True,
        ),
        Operand("scale", _FP32, "N", "scales in use", written=True),
        Operand("reduced_amax", _FP32, "N", "amax over all ranks where that is wanted", optional=True),
    ),
    keyword_operands=frozenset({"reduced_amax"}),
    flags=(
        Flag("fp8_max", FlagType.FLOAT, REQUIRED, "largest finite magnitude of the format"),
        Flag("margin", FlagType.INT, 0, "scale is divided by 2**margin; from -100 to 100"),
        Flag("amax_compute_algo", FlagType.CHOICE, "max", "window", ("max", "most_recent"), keyed=True),
    ),
    outputs=(),
    rules=(
        _FP8_MAX,
        # Beyond, fp8_max * 2**-margin leaves fp32's normal range: scales of 0, and infinities behind them.
        Rule("-100 <= margin <= 100", "margin must be from -100 to 100"),
        Rule("amax_history.shape[:1] != (0,)", "amax_history needs at least one row, the running amax"),
    ),
    contract=Contract(("D1", "D2", "D3", "D4"), "maxima, one division and a copy", exact=True),
)

UPDATE_DELAYED_SCALES = OpSchema(
    name="update_delayed_scales",
    family=Family.AMAX,
    summary="update_delayed_scale of several histories at once, each with its own shape and format.",
    operands=(
        Operand("amax_histories", _FP32, "L N", "as amax_history, one per group", written=True, many=True),
        Operand("scales", _FP32, "N", "as scale", written=True, many=True),
        Operand("reduced_amaxes", _FP32, "N", "as reduced_amax, of every group or of none", optional=True, many=True),
    ),
    keyword_operands=frozenset({"reduced_amaxes"}),
    flags=(
        Flag("fp8_maxima", FlagType.FLOATS, REQUIRED, "as fp8_max, one per group"),
        Flag("margin", FlagType.INT, 0, "scales are divided by 2**margin; from -100 to 100"),
        Flag("amax_compute_algo", FlagType.CHOICE, "max", "window", ("max", "most_recent"), keyed=True),
    ),
    outputs=(),
    rules=(
        Rule("len(fp8_maxima) == len(amax_histories)", "fp8_maxima needs one number per history"),
        Rule(
            f"0 < min(fp8_maxima) and max(fp8_maxima) <= {FLOAT32_MAX!r}",
            "fp8_maxima must be positive and at most fp32's largest",
        ),
        UPDATE_DELAYED_SCALE.rules[1],
        Rule("min(map(len, amax_histories)) > 0", "amax_histories need at least one row each, the running amax"),
    ),
    contract=UPDATE_DELAYED_SCALE.contract,
    optional=True,
)

SCHEMAS = (AMAX, COMPUTE_SCALE, UPDATE_DELAYED_SCALE, UPDATE_DELAYED_SCALES)
