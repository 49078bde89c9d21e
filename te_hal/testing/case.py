"""A case: one call of one op, named by what makes it differ from the op's everyday call."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.block_scales import rows_and_cols
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ScalingMode
from te_hal.schema.gemm import pairing
from te_hal.schema.nvfp4_layout import BLOCK, NVFP4_MODES
from te_hal.schema.shapes import shape_source
from te_hal.schema.validate import describe_call
from te_hal.testing.axes import apart, axes_of, takes
from te_hal.testing.covering import cover
from te_hal.testing.operands import arguments_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.schema.op import OpSchema
    from te_hal.testing.axes import Axes

_EVERYDAY = "everyday"
#: Dimensions of an operand whose rows can lie far apart.
_FAR_RANK = 2


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        op: name of the op.
        words: axis to value, every axis of the op.
    """

    op: str
    words: Mapping[str, str] = field(hash=False)

    @property
    def id(self) -> str:
        """What ``--case`` takes: the op, and each axis whose value is not the everyday one."""
        usual = everyday(self.op)
        other = [f"{axis}={word}" for axis, word in self.words.items() if word != usual[axis]]
        return f"{self.op}:{','.join(other) or _EVERYDAY}"

    @property
    def schema(self) -> OpSchema:
        """The op's."""
        return SCHEMAS[self.op]

    def arguments(self) -> dict[str, Any]:
        """Every argument by name, dense and on the CPU; new tensors with the same values at every call."""
        return arguments_of(self.schema, self.words)

    @staticmethod
    def of(text: str) -> Case:
        """The case of an id, whether or not it is among those that :func:`cases` gives; of any shape and number.

        Raises:
            ArgumentError: no op, axis or value of that name, an axis twice, or together no call that the op takes.
        """
        op, _, rest = text.partition(":")
        if op not in SCHEMAS:
            raise ArgumentError("case", got=repr(text), accepted=f"an op: {', '.join(SCHEMAS)}", todo="copy a whole id")
        axes, words = _axes(op), everyday(op)
        given: set[str] = set()
        for item in rest.split(",") if rest not in ("", _EVERYDAY) else []:
            axis, _, word = item.partition("=")
            if not takes(SCHEMAS[op], axis, word):
                accepted = f"{axis}=, one of {', '.join(axes[axis])}" if axis in axes else f"an axis: {', '.join(axes)}"
                raise ArgumentError(f"case of {op}", got=repr(item), accepted=accepted, todo="copy a whole id")
            if axis in given:
                got = f"{axis} twice in {text!r}"
                raise ArgumentError(f"case of {op}", got=got, accepted="each axis once", todo="leave one out")
            given.add(axis)
            words[axis] = word
        if not is_valid(SCHEMAS[op], words):
            raise ArgumentError(
                f"case of {op}",
                got=repr(rest),
                accepted="a call that keeps the rules of the op",
                todo="see docs/ops.md",
            )
        return Case(op, words)


@functools.cache
def cases(op: str, *, quick: bool = False, streams: bool = False) -> tuple[Case, ...]:
    """The cases of an op, the same everywhere.

    Args:
        op: its name.
        quick: every value of every axis at least once; else every pair of values of two axes that the op takes.
        streams: with cases for devices that have streams.
    """
    schema = SCHEMAS[op]
    axes = {axis: tuple(words) for axis, words in _axes(op).items()}
    if not streams:
        axes["run"] = tuple(word for word in axes["run"] if word != "streams")
    covering = [
        words for part in apart(axes) for words in cover(part, lambda words: is_valid(schema, words), pairs=not quick)
    ]
    return tuple(Case(op, words) for words in covering)


def everyday(op: str) -> dict[str, str]:
    """The first value of every axis, which an id does not mention."""
    return {axis: values[0] for axis, values in _axes(op).items()}


@functools.cache
def _axes(op: str) -> Axes:
    return axes_of(SCHEMAS[op])


def is_valid(schema: OpSchema, words: Mapping[str, str]) -> bool:
    """Whether the op takes such a call: its rules are asked about tensors without data."""
    if words["memory"] == "far" and not _can_be_far(words):
        return False
    try:
        arguments = arguments_of(schema, words, torch.device("meta"))
        call = describe_call(schema, arguments)
    except ArgumentError:
        return False
    if schema.name == "gemm" and not pairing(call):
        return False
    if not _keeps_nvfp4(schema, arguments):
        return False
    return all(eval(rule.condition, {}, dict(arguments)) for rule in schema.rules)  # noqa: S307 - the schema's own text


def _keeps_nvfp4(schema: OpSchema, arguments: Mapping[str, Any]) -> bool:
    """NV1 and NV6 of a cast: whole blocks in both directions, and bf16 for Hadamard's transform."""
    mode = arguments.get("mode")
    if mode not in NVFP4_MODES:
        return True
    variant = arguments[schema.variant] if schema.variant else None
    shape = eval(shape_source(schema, schema.outputs[0].shape, variant), {}, dict(arguments))  # noqa: S307 - the schema's
    first = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
    whole = all(size % BLOCK == 0 for size in rows_and_cols(tuple(shape)))
    return whole and (
        mode is not ScalingMode.NVFP4_HADAMARD or not arguments["columnwise"] or first.dtype is torch.bfloat16
    )


def _can_be_far(words: Mapping[str, str]) -> bool:
    """Rows far apart: at least two of them, an element in each, one thread (the memory is reserved twice over)."""
    sizes = [int(size) for size in words["shape"].split("x") if size != "scalar"]
    return len(sizes) >= _FAR_RANK and min(sizes) > 1 and words["run"] == "twice"
