"""The case of the conformance kit that a real call belongs to: its op, dtypes, flags and sizes, not its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError
from te_hal.schema.storage import QuantizedStorage
from te_hal.testing.axes import COPIES, WORDS, axes_of, flag_axis, flag_word
from te_hal.testing.case import Case
from te_hal.testing.sizes import shape_word

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from te_hal.schema.op import Operand
    from te_hal.schema.storage_kind import StorageKind


def case_id(op: str, arguments: Mapping[str, Any]) -> str:
    """What ``te-hal conformance --case`` takes for calls of this kind; empty where the kit has none.

    Its operands hold everyday values: those of the call are in the file that te_hal.shadow writes.

    Args:
        op: its name.
        arguments: every argument by name.
    """
    schema = SCHEMAS[op]
    axes = axes_of(schema)
    given = {o.name: _first(arguments[o.name]) for o in schema.operands if arguments[o.name] is not None}
    variant = arguments[schema.variant] if schema.variant else None
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    words = {"shape": shape_word(schema, shapes, getattr(variant, "value", variant))}
    for operand in schema.operands:
        words[operand.name] = _operand_word(operand, given.get(operand.name))
    for flag in schema.flags:
        axis = flag_axis(schema, flag.name)
        if axis in axes:
            words[axis] = flag_word(flag, arguments[flag.name])
    text = ",".join(f"{axis}={word}" for axis, word in words.items() if axis in axes)
    try:
        return Case.of(f"{op}:{text}").id
    except ArgumentError:
        return ""


def _first(value: Any) -> Any:  # noqa: ANN401 - an operand
    return value[0] if isinstance(value, (list, tuple)) else value


def _operand_word(operand: Operand, value: torch.Tensor | QuantizedStorage | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, QuantizedStorage):
        return "given" if operand.written else _storage_word(value.kind)
    return WORDS.get(value.dtype, "")


def _storage_word(kind: StorageKind) -> str:
    """Format, mode and copies; the order of a columnwise copy counts only where there is one."""
    copies = (kind.rowwise, kind.columnwise)
    for word, (rowwise, columnwise, order) in COPIES.items():
        if copies == (rowwise, columnwise) and (order is kind.order or not columnwise):
            return f"{kind.format.name.lower()}.{kind.mode.value}.{word}"
    return ""
