"""Schemas of the fused ops: a cast in one pass with what makes its input (optional; te_hal.ops holds compositions).

All of them take the scale in one of two ways. With ``scale`` (delayed scaling) the fp32 result is cast by it, and
``amax`` records. Without it the result's own amax gives the scale, or each block's its own; what is cast is then first
rounded to the dtype of ``input`` (docs/numerics.md, F1 to F3).
"""

from __future__ import annotations

import torch

from te_hal.schema import activation, norm
from te_hal.schema.cast import (
    ANY_COPY,
    CODE_DTYPE,
    COPIES,
    EPSILON,
    MODE,
    MTFP8_ORDER,
    NVFP4_RULES,
    RESULT_DTYPE,
    ROUNDING_SEED,
)
from te_hal.schema.formats import E4M3, E5M2, FLOATS
from te_hal.schema.op import (
    Contract,
    Family,
    Flag,
    FlagType,
    Operand,
    OpSchema,
    Output,
    Rule,
    one_rounding,
)

_FP32 = (torch.float32,)
_SCALE = Operand("scale", _FP32, "1", "factor into the format; None: from the result's own amax", optional=True)
_AMAX = Operand("amax", _FP32, "1", "with scale: becomes max(amax, max|result|)", optional=True, written=True)
_KEYWORDS = frozenset({"amax"})
_OWN_SCALE = (
    Flag("amax_epsilon", FlagType.FLOAT, 0.0, "without scale: floor of amax"),
    Flag("power_of_2", FlagType.BOOL, False, "without scale: round scales down to powers of two"),
)
_CAST = (
    CODE_DTYPE,
    MODE,
    *COPIES,
    *_OWN_SCALE,
    ROUNDING_SEED,
)
_CAST_RULES = (
    ANY_COPY,
    MTFP8_ORDER,
    *NVFP4_RULES,
    EPSILON,
    Rule("scale is None or mode == 'tensor'", "`scale` goes with per-tensor scaling (mode 'tensor')"),
    Rule("amax is None or scale is not None", "`amax` records where `scale` is given; without it nothing is recorded"),
    Rule(
        "scale is None or (amax_epsilon == 0.0 and not power_of_2)",
        "amax_epsilon and power_of_2 shape the result's own scale; leave them out where `scale` is given",
    ),
)
_CODES = "storage with the asked copies, nominal dtype that of input"
_OFF = 1e-3

QUANTIZE_CURRENT = OpSchema(
    name="quantize_current",
    family=Family.FUSED,
    summary="amax, compute_scale and quantize: cast by the scale that the tensor's own amax gives.",
    operands=(
        Operand("input", FLOATS, "...", "what to cast, any shape"),
        Operand("out", (), "*input", "storage to refill", formats=(E4M3, E5M2), optional=True, written=True),
    ),
    keyword_operands=frozenset({"out"}),
    flags=(RESULT_DTYPE, *COPIES, *_OWN_SCALE),
    outputs=(Output("output", "*input", "dtype", f"{_CODES}; `out` itself where given"),),
    rules=(
        ANY_COPY,
        EPSILON,
        Rule(
            "out is None or (out.kind.format.dtype == dtype and out.kind.mode == 'tensor'"
            " and out.kind.rowwise == rowwise and out.kind.columnwise == columnwise"
            " and (not columnwise or out.kind.order == columnwise_order))",
            "`out` must have per-tensor scaling and the format, copies and columnwise order that are asked for",
        ),
    ),
    contract=Contract(("A1", "S1", "S2", "S3", "S4", "C1"), "every step is a single IEEE operation", exact=True),
    optional=True,
    returns_storage=True,
)


def _norm_quantize(forward: OpSchema) -> OpSchema:
    """The schema of a norm whose result is cast: operands, settings and statistics are the norm's."""
    return OpSchema(
        name=forward.name.replace("_fwd", "_quantize"),
        family=Family.FUSED,
        summary=f"{forward.name}, and the cast of its result.",
        operands=(*forward.operands, _SCALE, _AMAX),
        keyword_operands=_KEYWORDS,
        flags=(*(flag for flag in forward.flags if flag.name != "out_dtype"), *_CAST),
        outputs=(Output("output", "*input", "dtype", _CODES), *forward.outputs[1:]),
        rules=(*forward.rules, *_CAST_RULES),
        contract=Contract(
            (*forward.contract.rules, "F1"), forward.contract.reason, bound=one_rounding(1e-6), codes_off=_OFF
        ),
        optional=True,
        returns_storage=True,
    )


LAYERNORM_QUANTIZE = _norm_quantize(norm.LAYERNORM_FWD)
RMSNORM_QUANTIZE = _norm_quantize(norm.RMSNORM_FWD)

_ACTIVATION_FLAGS = tuple(flag for flag in activation.ACTIVATION_FWD.flags if flag.name != "out_dtype")
_ACTIVATION_RULES = (*activation.ACTIVATION_FWD.rules, *_CAST_RULES)

ACTIVATION_QUANTIZE = OpSchema(
    name="activation_quantize",
    family=Family.FUSED,
    summary="activation_fwd, and the cast of its result.",
    operands=(*activation.ACTIVATION_FWD.operands, _SCALE, _AMAX),
    keyword_operands=_KEYWORDS,
    flags=(*_ACTIVATION_FLAGS, *_CAST),
    outputs=(Output("output", activation.ACTIVATION_FWD.outputs[0].shape, "dtype", _CODES),),
    variant="activation",
    rules=_ACTIVATION_RULES,
    contract=Contract(("V1", "V2", "V3", "F2"), "computed in fp32", bound=one_rounding(1e-6), codes_off=_OFF),
    optional=True,
    returns_storage=True,
)

ACTIVATION_BWD_QUANTIZE = OpSchema(
    name="activation_bwd_quantize",
    family=Family.FUSED,
    summary="activation_bwd, the cast of its result and, where asked for, that result's sum over rows.",
    operands=(*activation.ACTIVATION_BWD.operands, _SCALE, _AMAX),
    keyword_operands=_KEYWORDS,
    flags=(
        *_ACTIVATION_FLAGS,
        Flag("bias_grad", FlagType.BOOL, False, "also sum the gradient over its rows", keyed=True),
        *_CAST,
    ),
    outputs=(
        Output("grad_input", "*input", "dtype", _CODES),
        Output(
            "grad_bias",
            dict.fromkeys(activation.UNGATED, "F") | dict.fromkeys(activation.GATED, "2F"),
            "input",
            "sum over rows of what is cast: of the fp32 gradient with scale, of the rounded one without",
            when="bias_grad",
        ),
    ),
    variant="activation",
    rules=_ACTIVATION_RULES,
    contract=Contract(("V1", "V2", "V3", "F3", "G5"), "computed in fp32", bound=one_rounding(3e-6), codes_off=_OFF),
    optional=True,
    returns_storage=True,
)

BIAS_GRAD_QUANTIZE = OpSchema(
    name="bias_grad_quantize",
    family=Family.FUSED,
    summary="bias_grad and the cast of one gradient, which is given: nothing is rounded in between.",
    operands=(Operand("grad_output", FLOATS, "M N", "gradient of the layer's output"), _SCALE, _AMAX),
    keyword_operands=_KEYWORDS,
    flags=_CAST,
    outputs=(
        Output("output", "*grad_output", "dtype", "storage with the asked copies, nominal dtype that of grad_output"),
        Output("grad_bias", "N", "grad_output", "shape [N]"),
    ),
    rules=_CAST_RULES,
    contract=Contract(
        ("G5", "C1"), "an fp32 sum in any order; the codes are exact", bound=one_rounding(3e-6), codes_off=0.0
    ),
    optional=True,
    returns_storage=True,
)

SCHEMAS = (
    QUANTIZE_CURRENT,
    LAYERNORM_QUANTIZE,
    RMSNORM_QUANTIZE,
    ACTIVATION_QUANTIZE,
    ACTIVATION_BWD_QUANTIZE,
    BIAS_GRAD_QUANTIZE,
)
