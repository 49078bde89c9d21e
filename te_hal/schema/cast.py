"""Schemas of the cast family."""

from __future__ import annotations

import torch

from te_hal.schema.formats import (
    CODE_DTYPES,
    E2M1,
    E4M3,
    E5M2,
    FLOAT32_MAX,
    FLOATS,
    FP8_DTYPES,
    ColumnwiseOrder,
    ScalingMode,
)
from te_hal.schema.op import REQUIRED, Contract, Family, Flag, FlagType, Operand, OpSchema, Output, Rule

_FP32 = (torch.float32,)

#: Flags and rules of every op that casts.
RESULT_DTYPE = Flag("dtype", FlagType.DTYPE, REQUIRED, "element format of the result", FP8_DTYPES, keyed=True)
CODE_DTYPE = Flag(
    "dtype", FlagType.DTYPE, REQUIRED, "element format of the result; torch.uint8: E2M1", CODE_DTYPES, keyed=True
)
MODE = Flag("mode", FlagType.CHOICE, ScalingMode.TENSOR, "scaling mode", tuple(ScalingMode), keyed=True)
COPIES = (
    Flag("rowwise", FlagType.BOOL, True, "make the rowwise copy", keyed=True),
    Flag("columnwise", FlagType.BOOL, False, "make the columnwise copy", keyed=True),
    Flag(
        "columnwise_order",
        FlagType.CHOICE,
        ColumnwiseOrder.TRANSPOSED,
        "memory order of the columnwise copy",
        tuple(ColumnwiseOrder),
        keyed=True,
    ),
)
ANY_COPY = Rule("rowwise or columnwise", "at least one of rowwise and columnwise must be asked for")
EPSILON = Rule(f"0 <= amax_epsilon <= {FLOAT32_MAX!r}", "amax_epsilon must be a number from 0 to fp32's largest")

#: The rules that NVFP4's casts follow.
NVFP4 = ("NV1", "NV2", "NV3", "NV4", "NV5", "NV6")

#: Of every op that casts by blocks.
ROUNDING_SEED = Flag(
    "rounding_seed",
    FlagType.OPTIONAL_INT,
    None,
    "for NVFP4: round stochastically, by numbers that follow from this seed; None: to the nearest",
)
NVFP4_RULES = (
    Rule(
        "(mode[:5] == 'nvfp4') is not dtype.is_floating_point",
        "the modes of NVFP4 have E2M1 codes, two a byte: dtype=torch.uint8; the others torch.float8_e4m3fn or"
        " torch.float8_e5m2",
    ),
    Rule(
        "not columnwise or columnwise_order == 'transposed' or mode[:5] != 'nvfp4'",
        "in the modes of NVFP4 a columnwise copy lies transposed: columnwise_order='transposed'",
    ),
    Rule(
        "rounding_seed is None or (mode in ('nvfp4', 'nvfp4_hadamard') and 0 <= rounding_seed < 18446744073709551616)",
        "rounding_seed is an int from 0 to 2**64 - 1 and goes with modes 'nvfp4' and 'nvfp4_hadamard'",
    ),
)
MTFP8_ORDER = Rule(
    "not columnwise or columnwise_order == 'same' or mode not in ('mtfp8_1x128', 'mtfp8_128x128')",
    "in modes 'mtfp8_1x128' and 'mtfp8_128x128' a columnwise copy lies in rowwise order: columnwise_order='same'",
)

QUANTIZE = OpSchema(
    name="quantize",
    family=Family.CAST,
    summary="Cast to a scaled 8-bit or 4-bit format: clamp(input * scale), round; a scale per tensor or block.",
    operands=(
        Operand("input", FLOATS, "...", "what to cast, any shape"),
        Operand(
            "scale",
            _FP32,
            "1",
            "factor into the format, for per-tensor scaling and required there; any value, by C1 to C5",
            optional=True,
        ),
        Operand(
            "amax",
            _FP32,
            "1",
            "becomes max(amax, max|input|); for per-tensor scaling",
            optional=True,
            written=True,
        ),
        Operand("out", (), "*input", "storage to refill", formats=(E4M3, E5M2, E2M1), optional=True, written=True),
    ),
    keyword_operands=frozenset({"amax", "out"}),
    flags=(
        CODE_DTYPE,
        MODE,
        *COPIES,
        Flag("amax_epsilon", FlagType.FLOAT, 0.0, "floor of each block's amax, for modes block_1x128, block_128x128"),
        Flag("power_of_2", FlagType.BOOL, False, "round scales down to powers of two, for the same modes"),
        ROUNDING_SEED,
    ),
    outputs=(Output("output", "*input", "dtype", "storage with the asked copies; `out` itself where given"),),
    rules=(
        ANY_COPY,
        MTFP8_ORDER,
        *NVFP4_RULES,
        Rule(
            "scale is not None or mode != 'tensor'",
            "per-tensor scaling needs `scale`, an fp32 tensor of one element",
        ),
        Rule(
            "mode == 'tensor' or (scale is None and amax is None)",
            "`scale` and `amax` go with per-tensor scaling (mode 'tensor'); blocks find their own scales",
        ),
        EPSILON,
        Rule(
            "(amax_epsilon == 0.0 and not power_of_2) or mode in ('block_1x128', 'block_128x128')",
            "amax_epsilon and power_of_2 go with modes 'block_1x128' and 'block_128x128'; MXFP8's scales are powers of"
            " two without a floor, and a per-tensor `scale` is given",
        ),
        Rule(
            "out is None or (out.kind.format.dtype == dtype and out.kind.mode == mode"
            " and out.kind.rowwise == rowwise and out.kind.columnwise == columnwise"
            " and (not columnwise or out.kind.order == columnwise_order))",
            "`out` must have the format, mode, copies and columnwise order that are asked for",
        ),
    ),
    contract=Contract(
        (
            "C1",
            "C2",
            "C3",
            "C4",
            "C5",
            "A1",
            "B1",
            "B2",
            "B3",
            "M1",
            "M2",
            "T1",
            "T2",
            *NVFP4,
        ),
        "every step is a single IEEE operation",
        exact=True,
    ),
    returns_storage=True,
)

DEQUANTIZE = OpSchema(
    name="dequantize",
    family=Family.CAST,
    summary="Back to plain values: decode(code) * scale_inv in fp32, rounded once to the result dtype.",
    operands=(Operand("input", (), "...", "quantized data", formats=(E4M3, E5M2, E2M1)),),
    flags=(
        Flag(
            "out_dtype",
            FlagType.OPTIONAL_DTYPE,
            None,
            "result dtype; None: the nominal dtype",
            FLOATS,
            keyed=True,
        ),
    ),
    outputs=(Output("output", "*input", "out_dtype|input", "plain tensor, shape of input"),),
    contract=Contract(
        ("C6", "B4", "M3", "T3", "NV7"),
        "decode is exact, the product and the rounding are single IEEE operations",
        exact=True,
    ),
)

SCHEMAS = (QUANTIZE, DEQUANTIZE)
