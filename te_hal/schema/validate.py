"""Slow-path validation of a call: runs once per new combination of dtypes, devices and flags."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema import groups
from te_hal.schema.advice import instead_of_dtype, instead_of_storage
from te_hal.schema.errors import ArgumentError, ArgumentTypeError
from te_hal.schema.formats import FLOAT32_ZERO
from te_hal.schema.op import Flag, FlagType, Operand, OpSchema
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.schema.op import Rule
    from te_hal.schema.support import Kind

#: Beyond the largest float: ints there cannot be handed to a kernel.
_FLOAT_END = 2**1024 - 2**970
_SEE_REFERENCE = "see the op's page in docs/ops.md"


def describe_call(schema: OpSchema, arguments: Mapping[str, Any]) -> Call:
    """Check kinds, devices and keyed flags of a call, and describe it for capability questions.

    Args:
        schema: the op.
        arguments: every argument by name.

    Raises:
        ArgumentTypeError: an operand is neither a tensor nor a QuantizedStorage where one is accepted.
        ArgumentError: wrong dtype, format, layout or flag value; operands on different devices; a broken rule.
    """
    kinds = {o.name: _kind(schema, o, _first(schema, o, arguments[o.name])) for o in schema.operands}
    device = _one_device(schema, arguments)
    flags = {}
    for flag in schema.flags:
        if flag.keyed:
            _check_flag(schema, flag, arguments[flag.name])
            flags[flag.name] = arguments[flag.name]
    # Every call asks its rules after the kernel is known; those about what was checked here go before the question who
    # could run a wrong call.
    known = kinds.keys() | flags.keys()
    for rule in schema.rules:
        if _names_in(rule.condition) <= known and not eval(rule.condition, {}, dict(arguments)):  # noqa: S307 - the schema's own text
            raise rule_error(schema, rule, arguments)
    return Call(schema.name, device, kinds, flags)


def _first(schema: OpSchema, operand: Operand, value: Any) -> Any:  # noqa: ANN401
    """What stands for the operand: of several tensors the first. Every call checks the others (check_group)."""
    if not operand.many or value is None:
        return value
    groups.check_sequence(schema, operand.name, value)
    return value[0]


def check_other_group(element: OpSchema, arguments: Mapping[str, Any], device: torch.device) -> None:
    """Refuse a group whose tensors are none, of another dtype, or on another device than ``device``."""
    found = describe_call(element, arguments).device
    if found != device:
        raise ArgumentError(
            element.name, got=f"a group on {found}", accepted=f"all on {device}", todo="call once per device"
        )


def _kind(schema: OpSchema, operand: Operand, value: Any) -> Kind:  # noqa: ANN401 - anything a caller passed
    if value is None:
        if operand.optional:
            return None
        raise ArgumentTypeError(
            f"{schema.name}: {operand.name}", got="None", accepted=_accepted(operand), todo=_SEE_REFERENCE
        )
    if isinstance(value, QuantizedStorage):
        if value.format in operand.formats:
            return value.kind
        got = f"a QuantizedStorage ({value.kind!r})"
        raise ArgumentError(
            f"{schema.name}: {operand.name}", got=got, accepted=_accepted(operand), todo=instead_of_storage(operand)
        )
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(
            f"{schema.name}: {operand.name}",
            got=f"a {type(value).__name__}",
            accepted=_accepted(operand),
            todo=_SEE_REFERENCE,
        )
    if hasattr(value, "quantized_storage"):
        raise ArgumentTypeError(
            f"{schema.name}: {operand.name}",
            got=f"a {type(value).__name__}",
            accepted=_accepted(operand),
            todo="pass its .quantized_storage, or .dequantize() first",
        )
    if value.dtype not in operand.dtypes:
        raise ArgumentError(
            f"{schema.name}: {operand.name}",
            got=f"dtype {value.dtype}",
            accepted=_accepted(operand),
            todo=instead_of_dtype(operand, value.dtype),
        )
    check_layout(schema, operand.name, value)
    return value.dtype


def check_layout(schema: OpSchema, name: str, tensor: torch.Tensor) -> None:
    """Refuse sparse and nested tensors."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ArgumentError(
            f"{schema.name}: {name}",
            got="a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}",
            accepted="dense tensors (layout torch.strided)",
            todo="pad it, or pass its pieces one by one" if tensor.is_nested else "pass its .to_dense()",
        )


def _accepted(operand: Operand) -> str:
    parts = [str(dtype) for dtype in operand.dtypes]
    parts += [f"a QuantizedStorage in {fmt.name}" for fmt in operand.formats]
    if operand.optional:
        parts.append("None")
    return ", ".join(parts)


def _one_device(schema: OpSchema, arguments: Mapping[str, Any]) -> torch.device:
    found: dict[str, torch.device] = {}
    for operand in schema.operands:
        value = _first(schema, operand, arguments[operand.name])
        if value is not None:
            found[operand.name] = value.device
    devices = set(found.values())
    if len(devices) > 1:
        raise ArgumentError(
            schema.name,
            got=", ".join(f"{name} on {device}" for name, device in found.items()),
            accepted="all operands on one device",
            todo="move them with .to(device)",
        )
    return devices.pop()


def _check_flag(schema: OpSchema, flag: Flag, value: Any) -> None:  # noqa: ANN401
    if flag.type is FlagType.BOOL:
        right = isinstance(value, bool)
        accepted = "True, False"
    elif flag.type in (FlagType.DTYPE, FlagType.OPTIONAL_DTYPE):
        right = (isinstance(value, torch.dtype) and value in flag.choices) or (
            value is None and flag.type is FlagType.OPTIONAL_DTYPE
        )
        accepted = ", ".join(str(choice) for choice in flag.choices)
    else:
        right = isinstance(value, str) and value in flag.choices
        accepted = ", ".join(repr(getattr(choice, "value", choice)) for choice in flag.choices)
    if not right:
        raise ArgumentError(f"{schema.name}: {flag.name}", got=repr(value), accepted=accepted, todo=_SEE_REFERENCE)


def check_number(schema: OpSchema, name: str, value: object) -> None:
    """Refuse what is no plain number, and what kernels could not take as what it is.

    That is a bool, str, tensor or NaN; an int that no float holds; and a number that fp32, in which kernels have it,
    turns into 0.
    """
    number = isinstance(value, float) or (type(value) is int and -_FLOAT_END < value < _FLOAT_END)
    if not number or value != value:  # noqa: PLR0124 - NaN
        raise ArgumentError(f"{schema.name}: {name}", got=repr(value), accepted="a Python number", todo=_SEE_REFERENCE)
    if value and -FLOAT32_ZERO <= value <= FLOAT32_ZERO:  # type: ignore[operator] # a number, see above
        accepted = "0, or a number that is more than 0 in fp32 (above 2**-150), in either direction"
        raise ArgumentError(f"{schema.name}: {name}", got=repr(value), accepted=accepted, todo="pass 0.0 if 0 is meant")


def check_numbers(schema: OpSchema, name: str, value: object) -> None:
    """Refuse what is no list or tuple of plain numbers."""
    if not isinstance(value, (list, tuple)):
        accepted = "a list or tuple of Python numbers"
        raise ArgumentError(f"{schema.name}: {name}", got=repr(value), accepted=accepted, todo=_SEE_REFERENCE)
    for number in value:
        check_number(schema, name, number)


def check_integer(schema: OpSchema, name: str, value: object) -> None:
    """Refuse what is not a Python int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{schema.name}: {name}", got=repr(value), accepted="an int", todo=_SEE_REFERENCE)


def check_bool(schema: OpSchema, name: str, value: object) -> None:
    """Refuse what is not a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{schema.name}: {name}", got=repr(value), accepted="True, False", todo=_SEE_REFERENCE)


def check_window(schema: OpSchema, name: str, value: object) -> None:
    """Refuse what is not a pair of ints, each -1 or more."""
    pair = isinstance(value, tuple) and len(value) == 2 and all(type(v) is int and v >= -1 for v in value)  # noqa: PLR2004
    if not pair:
        raise ArgumentError(
            f"{schema.name}: {name}",
            got=repr(value),
            accepted="a tuple of two ints, each at least 0, or -1 for no limit",
            todo=_SEE_REFERENCE,
        )


def rule_error(schema: OpSchema, rule: Rule, arguments: Mapping[str, Any]) -> ArgumentError:
    """The error for a broken rule of the schema; shows the arguments that the rule names."""
    named = _names_in(rule.condition)
    got = ", ".join(f"{name}={_short(arguments[name])}" for name, _, _ in schema.signature if name in named)
    return ArgumentError(schema.name, got=got, accepted=rule.sentence, todo=_SEE_REFERENCE)


@functools.cache
def _names_in(condition: str) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(ast.parse(condition, mode="eval")) if isinstance(node, ast.Name))


def _short(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_short(item) for item in value)}]"
    return repr(value)
