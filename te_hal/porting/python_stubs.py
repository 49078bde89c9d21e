"""The ops of a family as Python functions to fill in: signature and text come from the schemas."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import torch

from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.op import REQUIRED, Family, FlagType

if TYPE_CHECKING:
    from te_hal.schema.op import Flag, Operand, OpSchema, Output

#: The families that every backend serves, and the file of each.
FAMILIES = {
    Family.CAST: "cast",
    Family.AMAX: "amax",
    Family.GEMM: "gemm",
    Family.NORM: "norm",
    Family.SOFTMAX: "softmax",
}
_WIDTH = 120
_ANNOTATIONS = {
    FlagType.BOOL: "bool",
    FlagType.INT: "int",
    FlagType.FLOAT: "float",
    FlagType.FLOATS: "Sequence[float]",
    FlagType.OPTIONAL_FLOAT: "float | None",
    FlagType.OPTIONAL_INT: "int | None",
    FlagType.CHOICE: "str",
    FlagType.DTYPE: "torch.dtype",
    FlagType.OPTIONAL_DTYPE: "torch.dtype | None",
    FlagType.WINDOW: "tuple[int, int]",
}


def schemas_of(family: Family) -> list[OpSchema]:
    """The ops of a family, in the catalog's order."""
    return [schema for schema in SCHEMAS.values() if schema.family is family]


def table_rows() -> str:
    """The rows of the capability table, commented out: a line per op of the five families."""
    lines = []
    for family, stem in FAMILIES.items():
        for schema in schemas_of(family):
            optional = "  # optional: composed of others where it is left out" if schema.optional else ""
            lines.append(f'    # "{schema.name}": Row({stem}.{schema.name}),{optional}')
    return "\n".join(lines)


def family_module(family: Family) -> str:
    """The text of a family's file."""
    schemas = schemas_of(family)
    bodies = [_function(schema) for schema in schemas]
    text = "\n\n\n".join(bodies)
    needed = ["import torch"] + ["from te_hal.schema.storage import QuantizedStorage"] * ("QuantizedStorage" in text)
    parts = [
        f'"""The {family.value} family: {", ".join(schema.name for schema in schemas)}."""',
        "from __future__ import annotations",
        *["from collections.abc import Sequence"] * ("Sequence[" in text),
        "\n".join(needed),
        f"\n{text}\n",
    ]
    return "\n\n".join(parts)


def _function(schema: OpSchema) -> str:
    return "\n".join(
        [
            f"def {schema.name}(",
            *(f"    {argument}," for argument in _parameters(schema)),
            f") -> {_result(schema)}:",
            textwrap.indent(_docstring(schema), "    "),
            f'    raise NotImplementedError("{schema.name} is not written yet")',
        ]
    )


def _parameters(schema: OpSchema) -> list[str]:
    annotations = {o.name: _operand_annotation(o) for o in schema.operands}
    annotations |= {f.name: _ANNOTATIONS[f.type] for f in schema.flags}
    found: list[str] = []
    for name, keyword_only, default in schema.signature:
        if keyword_only and "*" not in found:
            found.append("*")
        given = "" if default is REQUIRED else f" = {_literal(default)}"
        found.append(f"{name}: {annotations[name]}{given}")
    return found


def _operand_annotation(operand: Operand) -> str:
    kinds = ["torch.Tensor"] * bool(operand.dtypes) + ["QuantizedStorage"] * bool(operand.formats)
    text = " | ".join(kinds)
    text = f"Sequence[{text}]" if operand.many else text
    return f"{text} | None" if operand.optional else text


def _result(schema: OpSchema) -> str:
    kinds = [
        ("QuantizedStorage" if schema.returns_storage and index == 0 else "torch.Tensor")
        + (" | None" if output.when else "")
        for index, output in enumerate(schema.outputs)
    ]
    if not kinds:
        return "None"
    return kinds[0] if len(kinds) == 1 else f"tuple[{', '.join(kinds)}]"


def _literal(default: object) -> str:
    if isinstance(default, torch.dtype):
        return str(default)
    text = repr(getattr(default, "value", default))
    return text.replace("'", '"').replace("e+", "e")


def _docstring(schema: OpSchema) -> str:
    """What the schema says of the op, as a docstring of 4 columns less than a line."""
    contract = schema.contract
    bound = "every byte" if contract.exact else ", ".join(f"{_short(d)} {b:g}" for d, b in contract.bound.items())
    if contract.codes_off is not None:
        bound += f"; at most {contract.codes_off:.1%} of the codes off by one"
    sections = [
        _paragraph(schema.summary),
        "Args:\n" + "\n".join([*map(_operand_line, schema.operands), *map(_flag_line, schema.flags)]),
        *(["Returns:\n" + "\n".join(map(_output_line, schema.outputs))] if schema.outputs else []),
        *(["Given:\n" + "\n".join(_item(f"{rule.sentence}.") for rule in schema.rules)] if schema.rules else []),
        _paragraph(
            f"Contract: {bound} ({contract.reason}); rules {', '.join(contract.rules)} of te_hal's docs/numerics.md."
        ),
    ]
    return '"""' + "\n\n".join(sections) + '\n"""'


def _operand_line(operand: Operand) -> str:
    accepts = [*map(_short, operand.dtypes), *(f"{each.name} storage" for each in operand.formats)]
    accepts += ["None"] * operand.optional
    written = " Written in place." if operand.written else ""
    several = "several of " if operand.many else ""
    return _item(f"{operand.name}: {operand.doc}.{written} {several}{', '.join(accepts)}; {_shape(operand.shape)}")


def _flag_line(flag: Flag) -> str:
    choices = f" One of {', '.join(map(_short, flag.choices))}." if flag.choices else ""
    return _item(f"{flag.name}: {flag.doc}.{choices}")


def _output_line(output: Output) -> str:
    when = f"; None unless {output.when}" if output.when else ""
    dtype = _short(output.dtype).replace("|", " or ")
    return _item(f"{output.name}: {output.doc}. {dtype}; {_shape(output.shape)}{when}")


def _shape(rule: object) -> str:
    if isinstance(rule, str):
        if rule[0] in "*<":
            return f"shape {'of' if rule[0] == '*' else 'that broadcasts to that of'} {rule[1:]}"
        return "one element" if rule == "1" else f"[{', '.join(rule.split())}]"
    grouped: dict[str, list[str]] = {}
    for variant, text in rule.items():  # type: ignore[attr-defined] # a mapping
        grouped.setdefault(text, []).append(variant)
    return ", ".join(f"{_shape(text)} for {' '.join(names)}" for text, names in grouped.items())


def _short(value: object) -> str:
    return str(getattr(value, "value", value)).removeprefix("torch.")


def _paragraph(text: str) -> str:
    return textwrap.fill(text, _WIDTH - 4 - len('"""'))


def _item(text: str) -> str:
    return textwrap.fill(text, _WIDTH - 4, initial_indent="    ", subsequent_indent="        ")
