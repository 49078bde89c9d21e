"""OpSchema: what an op is, as data. Checks, null results, reference pages and conformance cases read it.

Shape rules are short strings. A rule is a row of symbols, one per dimension, the same symbol meaning the same
size in every operand of a call: ``"M K"``. ``"..."`` in front stands for any leading dimensions, equal in all
operands that use it; ``"2F"`` for a size that is twice ``F``; ``"1"`` for a tensor of one element of any rank;
``"*x"`` for the shape of operand ``x``; ``"<x"`` for a shape that broadcasts to operand ``x``'s. An operand whose
rule depends on a flag maps that flag's values to rules.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.schema.formats import ElementFormat

    ShapeRule = str | Mapping[str, str]


class Family(str, enum.Enum):
    """Op families. The first five are the contract that every backend serves; the rest has compositions."""

    CAST = "cast"
    AMAX = "amax"
    GEMM = "gemm"
    NORM = "norm"
    SOFTMAX = "softmax"
    ACTIVATION = "activation"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument.

    Attributes:
        name: argument name.
        dtypes: accepted torch dtypes.
        shape: shape rule, or one per value of the op's ``variant`` flag.
        formats: element formats accepted as a QuantizedStorage; empty: tensors only.
        optional: may be None.
        written: written in place.
        many: a list or tuple of such tensors, one per group; shape symbols hold within a group. Every such operand
            has as many as the first, and all are on one device.
        doc: one line for the reference page.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    shape: ShapeRule
    doc: str
    formats: tuple[ElementFormat, ...] = ()
    optional: bool = False
    written: bool = False
    many: bool = False


class FlagType(str, enum.Enum):
    """What a non-tensor argument may be."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    FLOATS = "list of float"
    OPTIONAL_FLOAT = "float or None"
    OPTIONAL_INT = "int or None"
    CHOICE = "choice"
    DTYPE = "dtype"
    OPTIONAL_DTYPE = "dtype or None"
    WINDOW = "pair of int"


REQUIRED = object()  #: default of a flag that must be given


@dataclass(frozen=True, slots=True)
class Flag:
    """A non-tensor, keyword-only argument.

    Attributes:
        keyed: the capability answer and the choice of kernel may depend on it; part of the memo's key.
        choices: accepted values of a CHOICE or DTYPE flag.
    """

    name: str
    type: FlagType
    default: object
    doc: str
    choices: tuple[object, ...] = ()
    keyed: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A result.

    Attributes:
        dtype: a torch dtype, or the names that decide it, operands or flags: ``"a|b"`` is the first that is not None.
        when: the bool flag that asks for this result, which is None otherwise; None: it is always there.
    """

    name: str
    shape: ShapeRule
    dtype: torch.dtype | str
    doc: str
    when: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition over argument names, written in Python, with the sentence that explains its failure."""

    condition: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Contract:
    """How close a backend must come to the rules in ``docs/numerics.md``.

    Attributes:
        exact: every byte equal to the reference.
        bound: else, per output dtype, the largest ``norm(out - ref) / norm(ref)`` against float64, over at least 256
            results of random operands of everyday size.
        reason: where the bound comes from.
        rules: the numbered rules of docs/numerics.md that define the result.
        codes_off: of an op that casts what it has computed within a bound: the largest share of codes that may be one
            off the reference's (whose amax and scale_inv may then differ by twice the fp32 bound). Given the
            same fp32 result, the codes are equal.
    """

    rules: tuple[str, ...]
    reason: str
    exact: bool = False
    bound: Mapping[torch.dtype, float] = field(default_factory=dict)
    codes_off: float | None = None


def one_rounding(float32: float) -> dict[torch.dtype, float]:
    """Bounds of results that are computed in fp32 to within ``float32`` and then rounded once.

    The error of one rounding is at most u / sqrt(3) in the root mean square, u being 2**-8 for bf16 and 2**-11 for
    fp16. Measured on normal results: 1.7e-3 and 2.1e-4. Two roundings give 2.35e-3 and 3.0e-4, and are told apart.
    """
    return {torch.float32: float32, torch.float16: 2.9e-4, torch.bfloat16: 2.3e-3}


@dataclass(frozen=True, slots=True)
class OpSchema:
    """One op of the interface.

    Attributes:
        operands: positional arguments, in order; those with ``keyword`` in their name's set are keyword-only.
        flags: keyword-only arguments.
        outputs: results in order; empty when everything is written in place.
        variant: the flag that chooses among shape rules, if any.
        rules: conditions beyond dtypes and shapes; ``keyed_rules`` depend on kinds and keyed flags alone.
        optional: backends need not have it: te_hal.ops holds a composition.
        returns_storage: the first result is a QuantizedStorage.
    """

    name: str
    family: Family
    summary: str
    operands: tuple[Operand, ...]
    flags: tuple[Flag, ...]
    outputs: tuple[Output, ...]
    contract: Contract
    variant: str | None = None
    rules: tuple[Rule, ...] = ()
    keyword_operands: frozenset[str] = frozenset()
    optional: bool = False
    returns_storage: bool = False

    @property
    def signature(self) -> tuple[tuple[str, bool, object], ...]:
        """(name, keyword-only, default) of every argument, in order: what a kernel's signature must equal."""
        arguments: list[tuple[str, bool, object]] = [
            (o.name, o.name in self.keyword_operands, None if o.optional else REQUIRED) for o in self.operands
        ]
        arguments.sort(key=lambda argument: argument[1])
        arguments += [(flag.name, True, flag.default) for flag in self.flags]
        return tuple(arguments)

    def split(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments by name as a call passes them: by position and by keyword; those that are left out stay out."""
        given = [(name, keyword_only) for name, keyword_only, _ in self.signature if name in arguments]
        by_keyword = {name: arguments[name] for name, keyword_only in given if keyword_only}
        return [arguments[name] for name, keyword_only in given if not keyword_only], by_keyword

    def shape_rule(self, rule: ShapeRule, variant_value: object) -> str:
        """The shape rule in force for a value of the variant flag."""
        return rule if isinstance(rule, str) else rule[str(variant_value)]
