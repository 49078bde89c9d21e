"""Generates, per op, the function that every call passes through: memo look-up, then rank and shape checks.

The generated source is straight-line Python over the schema's data. On a hit it reads dtype, type and device of
each operand once, looks the kernel up, and compares sizes; whatever else can be wrong with a call (dtypes,
devices, keyed flags) is decided on the miss and remembered by the memo's key. ``entry_source`` shows the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema import groups, shapes, validate, written
from te_hal.schema.formats import FLOAT32_ZERO
from te_hal.schema.op import FlagType, Operand, OpSchema
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    Kernel = Callable[..., Any]
    #: A kernel, and the number of its calls.
    Hit = tuple[Kernel, list[int]]
    Memo = dict[tuple[object, ...], Hit]

# Not a float, NaN, or so small that kernels, which have it in fp32, would take it for 0.
_NO_NUMBER = f"type({{0}}) is not float or not ({{0}} > {FLOAT32_ZERO!r} or {{0}} == 0 or {{0}} < {-FLOAT32_ZERO!r})"
# bool is here although it may be keyed: 1 finds the kernel remembered for True.
_ALWAYS_CHECKED = {
    FlagType.FLOAT: (_NO_NUMBER, "check_number"),
    FlagType.FLOATS: ("True", "check_numbers"),
    FlagType.OPTIONAL_FLOAT: (f"{{0}} is not None and ({_NO_NUMBER})", "check_number"),
    FlagType.OPTIONAL_INT: ("{0} is not None and type({0}) is not int", "check_integer"),
    FlagType.INT: ("type({0}) is not int", "check_integer"),
    FlagType.BOOL: ("type({0}) is not bool", "check_bool"),
    FlagType.WINDOW: ("{0} != (-1, -1)", "check_window"),
}


def compile_entry(
    schema: OpSchema,
    current_memo: Callable[[], Memo],
    on_miss: Callable[[OpSchema, tuple[object, ...] | None, dict[str, Any]], Hit],
) -> Kernel:
    """Build the op's entry: takes every argument positionally in signature order, returns the kernel to call.

    Args:
        schema: the op.
        current_memo: returns the memo of the selection in force. Calls that pass the checks are counted in it.
        on_miss: validates the call, picks a kernel and stores it with its count under the key; its error is the
            caller's. With key None an operand lacks dtype or device, and validation must fail.
    """
    namespace = _namespace(schema) | {"current_memo": current_memo, "on_miss": on_miss}
    if _many(schema):
        namespace["check_group"] = _compile(
            f"check_{schema.name}", group_source(schema), _namespace(groups.element_of(schema))
        )
    return _compile(f"enter_{schema.name}", entry_source(schema), namespace)


def _compile(name: str, source: str, namespace: dict[str, Any]) -> Kernel:
    exec(compile(source, f"<te_hal {name}>", "exec"), namespace)  # noqa: S102 - own text
    function: Kernel = namespace[name]
    return function


def _namespace(schema: OpSchema) -> dict[str, Any]:
    """What the generated text refers to."""
    return {
        "S": QuantizedStorage,
        "SCHEMA": schema,
        "OPERANDS": {operand.name: operand for operand in schema.operands},
        "Tensor": torch.Tensor,
        "check_groups": groups.check_groups,
        "check_other_group": validate.check_other_group,
        "check_numbers": validate.check_numbers,
        "broadcasts": shapes.broadcasts,
        "shape_error": shapes.shape_error,
        "rule_error": validate.rule_error,
        "check_number": validate.check_number,
        "check_integer": validate.check_integer,
        "check_bool": validate.check_bool,
        "check_window": validate.check_window,
        "strided": torch.strided,
        "check_layout": validate.check_layout,
        "check_written": written.check_written,
    }


def _many(schema: OpSchema) -> list[Operand]:
    return [operand for operand in schema.operands if operand.many]


def group_source(schema: OpSchema) -> str:
    """The Python text of the check of one group, for an op that takes several: ``check_<op>(device, *operands)``."""
    element = groups.element_of(schema)
    arguments = "{" + ", ".join(f"{o.name!r}: {o.name}" for o in element.operands) + "}"
    lines = [f"def check_{schema.name}(device, {', '.join(o.name for o in element.operands)}):"]
    for operand in element.operands:
        name = operand.name
        given = f"{name} is not None and " if operand.optional else ""
        dtypes = f"{name}.dtype not in OPERANDS[{name!r}].dtypes"
        lines += [
            f"    if {given}(type({name}) is not Tensor or {dtypes} or {name}.device != device):",
            f"        check_other_group(SCHEMA, {arguments}, device)",
        ]
    lines += _layout_checks(element) + _written_checks(element) + _shape_checks(element, arguments)
    return "\n".join(lines) + "\n"


def entry_source(schema: OpSchema) -> str:
    """The Python text of the entry that :func:`compile_entry` builds."""
    names = [name for name, _, _ in schema.signature]
    arguments = "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"
    lines = [
        f"def enter_{schema.name}({', '.join(names)}):",
        "    try:",
        f"        key = ({', '.join(_key(schema))},)",
        f"    except {'(AttributeError, IndexError, KeyError, TypeError)' if _many(schema) else 'AttributeError'}:",
        f"        on_miss(SCHEMA, None, {arguments})",
        "        raise",
        "    try:",
        "        kernel, count = current_memo()[key]",
        "    except (KeyError, TypeError):",
        f"        kernel, count = on_miss(SCHEMA, key, {arguments})",
    ]
    if _many(schema):
        lines.append(f"    check_groups(SCHEMA, check_group, ({', '.join(o.name for o in _many(schema))},))")
    for flag in schema.flags:
        if flag.type in _ALWAYS_CHECKED:
            condition, check = _ALWAYS_CHECKED[flag.type]
            lines += [
                f"    if {condition.format(flag.name)}:",
                f"        {check}(SCHEMA, {flag.name!r}, {flag.name})",
            ]
    for index, rule in enumerate(schema.rules):
        lines += [
            f"    if not ({rule.condition}):",
            f"        raise rule_error(SCHEMA, SCHEMA.rules[{index}], {arguments})",
        ]
    if not _many(schema):
        lines += _layout_checks(schema) + _written_checks(schema) + _shape_checks(schema, arguments)
    lines += ["    count[0] += 1", "    return kernel"]
    return "\n".join(lines) + "\n"


def _key(schema: OpSchema) -> list[str]:
    parts = [repr(schema.name)]
    for operand in schema.operands:
        name = operand.name
        if operand.many:  # the first stands for all; the check of each group sees to that
            first = f"{name}[0].dtype, {name}[0].device"
            parts.append(f"None if {name} is None else ({first})" if operand.optional else first)
            continue
        dtype = f"{name}.kind if isinstance({name}, S) else {name}.dtype" if operand.formats else f"{name}.dtype"
        facts = [f"type({name})", dtype, f"{name}.device"]
        if operand.optional:
            parts.append(f"None if {name} is None else ({', '.join(facts)})")
        else:
            parts += facts
    return parts + [flag.name for flag in schema.flags if flag.keyed]


def _layout_checks(schema: OpSchema) -> list[str]:
    """Always, not by the key: finding the kernel has the tighter budget. Storages have the layout of their buffers."""
    lines = []
    for operand in schema.operands:
        name = operand.name
        given = f"{name} is not None and " if operand.optional else ""
        lines += [
            f"    if {given}{name}.layout is not strided:",
            f"        check_layout(SCHEMA, {name!r}, {name})",
        ]
    return lines


def _written_checks(schema: OpSchema) -> list[str]:
    """For plain tensors: a storage's buffers are its own. A single element overlaps nothing."""
    lines = []
    for operand in schema.operands:
        if operand.written and not operand.formats:
            name = operand.name
            given = f"{name} is not None and " if operand.optional else ""
            suspect = f"{name}.requires_grad"
            if operand.shape != "1":
                suspect = f"({suspect} or not {name}.is_contiguous())"
            lines += [f"    if {given}{suspect}:", f"        check_written(SCHEMA, {name!r}, {name})"]
    return lines


def _shape_checks(schema: OpSchema, arguments: str) -> list[str]:
    if schema.variant is None:
        return [f"    {line}" for line in _ShapeChecks(schema, None, arguments).lines()]
    grouped: dict[tuple[str, ...], list[object]] = {}
    flag = next(f for f in schema.flags if f.name == schema.variant)
    for value in flag.choices:
        grouped.setdefault(tuple(_ShapeChecks(schema, value, arguments).lines()), []).append(value)
    lines = []
    for word, (body, values) in zip(["if", *["elif"] * len(grouped)], grouped.items(), strict=False):
        test = f"{flag.name} == {values[0]!r}" if len(values) == 1 else f"{flag.name} in {tuple(values)!r}"
        lines += [f"    {word} {test}:", *[f"        {line}" for line in body]]
    return lines


class _ShapeChecks:
    """Emits the comparisons of one variant, binding each symbol where it first occurs."""

    def __init__(self, schema: OpSchema, variant: object, arguments: str) -> None:
        self.schema, self.variant, self.arguments = schema, variant, arguments
        self.bound: set[str] = set()

    def lines(self) -> list[str]:
        lines = []
        for operand in self.schema.operands:
            body = self._operand(operand, self.schema.shape_rule(operand.shape, self.variant))
            if operand.optional and body:
                body = [f"if {operand.name} is not None:", *[f"    {line}" for line in body]]
            lines += body
        return lines

    def _operand(self, operand: Operand, rule: str) -> list[str]:
        name = operand.name
        if rule == "1":
            return self._fail_if(f"{name}.numel() != 1", name)
        if rule[0] == "*":
            return self._fail_if(f"{name}.shape != {rule[1:]}.shape", name)
        if rule[0] == "<":
            return self._fail_if(f"not broadcasts({name}.shape, {rule[1:]}.shape)", name)
        dims = shapes.parse(rule)
        if dims.leading and not dims.sizes:
            return self._leading(name, f"{name}.shape")
        count = len(dims.sizes)
        lines = [f"s = {name}.shape"]
        lines += self._fail_if(f"len(s) {'<' if dims.leading else '!='} {count}", name)
        if dims.leading:
            lines += self._leading(name, f"s[:-{count}]")
        for index, (factor, symbol) in enumerate(dims.sizes):
            lines += self._size(name, f"s[{index - count}]", factor, symbol)
        return lines

    def _leading(self, name: str, shape: str) -> list[str]:
        if not self._others_use_leading(name):
            return []
        if "lead" in self.bound:
            return self._fail_if(f"{shape} != lead", name)
        self.bound.add("lead")
        return [f"lead = {shape}"]

    def _others_use_leading(self, name: str) -> bool:
        rules = [self.schema.shape_rule(o.shape, self.variant) for o in self.schema.operands if o.name != name]
        return any(rule.startswith("...") for rule in rules)

    def _size(self, name: str, size: str, factor: int, symbol: str) -> list[str]:
        variable = f"d_{symbol}"
        if symbol in self.bound:
            expected = variable if factor == 1 else f"{factor} * {variable}"
            return self._fail_if(f"{size} != {expected}", name)
        self.bound.add(symbol)
        if factor == 1:
            return [f"{variable} = {size}"]
        return [f"{variable}, rest = divmod({size}, {factor})", *self._fail_if("rest", name)]

    def _fail_if(self, condition: str, name: str) -> list[str]:
        return [f"if {condition}:", f"    raise shape_error(SCHEMA, OPERANDS[{name!r}], {self.arguments})"]
