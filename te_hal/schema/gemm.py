"""Schemas of the gemm family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.backend import ALONG_THE_SUM
from te_hal.schema.formats import E2M1, E4M3, E5M2, FLOATS, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.op import Contract, Family, Flag, FlagType, Operand, OpSchema, Output, Rule, one_rounding
from te_hal.schema.storage_kind import StorageKind
from te_hal.schema.support import SUPPORTED, Code, Support

if TYPE_CHECKING:
    from te_hal.schema.support import Call

#: The three products of a linear layer y = x @ w.T, by what they make.
LAYOUTS = ("fprop", "dgrad", "wgrad")

GEMM = OpSchema(
    name="gemm",
    family=Family.GEMM,
    summary="fprop: a @ b.T (+ bias); dgrad: a @ b; wgrad: a.T @ b. Operands plain or quantized, of one family.",
    operands=(
        Operand(
            "a",
            FLOATS,
            {"fprop": "M K", "dgrad": "M N", "wgrad": "M N"},
            "input (fprop) or grad_output (dgrad, wgrad)",
            formats=(E4M3, E5M2, E2M1),
        ),
        Operand(
            "b",
            FLOATS,
            {"fprop": "N K", "dgrad": "N K", "wgrad": "M K"},
            "weight (fprop, dgrad) or input (wgrad)",
            formats=(E4M3, E5M2, E2M1),
        ),
        Operand(
            "bias",
            FLOATS,
            {"fprop": "N", "dgrad": "N", "wgrad": "N"},
            "added before the rounding",
            optional=True,
        ),
        Operand(
            "out",
            FLOATS,
            {"fprop": "M N", "dgrad": "M K", "wgrad": "N K"},
            "receives the result",
            optional=True,
            written=True,
        ),
    ),
    keyword_operands=frozenset({"bias", "out"}),
    flags=(
        Flag("layout", FlagType.CHOICE, "fprop", "which product", LAYOUTS, keyed=True),
        Flag("accumulate", FlagType.BOOL, False, "add to `out` instead of overwriting it", keyed=True),
        Flag(
            "out_dtype",
            FlagType.OPTIONAL_DTYPE,
            None,
            "result dtype; None: that of `out`, else a's (nominal) dtype",
            FLOATS,
            keyed=True,
        ),
    ),
    outputs=(
        Output(
            "output",
            {"fprop": "M N", "dgrad": "M K", "wgrad": "N K"},
            "out_dtype|a",
            "`out` itself where given",
        ),
    ),
    variant="layout",
    rules=(
        Rule("bias is None or layout == 'fprop'", "a bias goes with layout 'fprop' only"),
        Rule("not accumulate or out is not None", "accumulate=True needs `out`"),
        Rule(
            "out is None or out_dtype is None or out.dtype == out_dtype",
            "`out` and `out_dtype` must name one dtype",
        ),
    ),
    contract=Contract(
        ("G1", "G2", "G3", "G4", "B5", "NV8"),
        "products are exact, sums are fp32 in any order (one after the other up to K = 8192), one rounding",
        bound=one_rounding(3e-6),
    ),
)

BIAS_GRAD = OpSchema(
    name="bias_grad",
    family=Family.GEMM,
    summary="Gradient of a bias: the sum over rows, in fp32, rounded once.",
    operands=(Operand("grad_output", FLOATS, "M N", "gradient of the layer's output"),),
    flags=(
        Flag(
            "out_dtype",
            FlagType.OPTIONAL_DTYPE,
            None,
            "result dtype; None: grad_output's",
            FLOATS,
            keyed=True,
        ),
    ),
    outputs=(Output("grad_bias", "N", "out_dtype|grad_output", "shape [N]"),),
    contract=Contract(
        ("G5",),
        "an fp32 sum in any order (one after the other up to M = 8192), one rounding",
        bound=one_rounding(3e-6),
    ),
    optional=True,
)

#: Scaling modes whose operands are multiplied with each other (docs/numerics.md, B5).
_PAIRED = (
    frozenset({ScalingMode.TENSOR}),
    frozenset({ScalingMode.BLOCK_1X128, ScalingMode.BLOCK_128X128}),
    frozenset({ScalingMode.MXFP8}),
    NVFP4_MODES,
    frozenset({ScalingMode.MTFP8_1X128, ScalingMode.MTFP8_128X128}),
)


def pairing(call: Call) -> Support:
    """No to a product of operands whose scaling modes belong to different families; a backend asks this first."""
    kinds = (call.kinds.get("a"), call.kinds.get("b"))
    modes = {kind.mode for kind in kinds if isinstance(kind, StorageKind)}
    if any(modes <= family for family in _PAIRED):
        return _one_basis(call)
    named = " and ".join(sorted(repr(mode.value) for mode in modes))
    return Support.no(Code.MODE, f"no product of operands with scaling modes {named}; quantize both by one recipe")


def _one_basis(call: Call) -> Support:
    """No where only one operand is read as Hadamard's transform along the sum, which cancels between two (NV6)."""
    reads = ALONG_THE_SUM[str(call.flags.get("layout", LAYOUTS[0]))]
    transformed = [_is_transformed(call.kinds.get(name), copy) for name, copy in (("a", reads.a), ("b", reads.b))]
    if transformed[0] is transformed[1]:
        return SUPPORTED
    sentence = (
        "no product of an operand that is Hadamard-transformed along the sum (the columnwise copy of 'nvfp4_hadamard')"
        " with one that is not; quantize both with the transform, or neither"
    )
    return Support.no(Code.MODE, sentence)


def _is_transformed(kind: object, copy: str) -> bool:
    """Whether what a product reads of an operand, ``copy`` or the one that is there, is transformed."""
    if not isinstance(kind, StorageKind) or kind.mode is not ScalingMode.NVFP4_HADAMARD:
        return False
    return kind.columnwise and (copy == "columnwise" or not kind.rowwise)


SCHEMAS = (GEMM, BIAS_GRAD)
