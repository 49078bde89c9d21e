"""A call described by names and dtypes: what a person writes, made into what dispatch is asked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import default_device
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import E2M1, E4M3, E5M2, FORMATS, ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.op import REQUIRED, FlagType
from te_hal.schema.storage import QuantizedStorage, StorageKind
from te_hal.schema.validate import describe_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.schema.op import Flag, Operand, OpSchema
    from te_hal.schema.support import Call

_SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bool": torch.bool}
_SHORT |= {f"fp8_{fmt.name.lower()}": fmt.dtype for fmt in (E4M3, E5M2)}
_SHORT |= {name.lower(): fmt.dtype for name, fmt in FORMATS.items()}
#: Scaling mode and copies of a quantized operand that names neither; of E2M1 the mode is NVFP4's.
_USUAL = (ScalingMode.TENSOR.value, "rowwise")
_USUAL_FP4 = (ScalingMode.NVFP4.value, "rowwise")
_META = torch.device("meta")
_WORDS = {"true": True, "false": False, "none": None}
#: An optional operand that the plainest call has all the same: with per-tensor scaling, which is the default.
_PLAIN = {("quantize", "scale"): {"mode": ScalingMode.TENSOR}}
#: Shape of a quantized stand-in: one block of every scaling mode.
_ONE_BLOCK = (128, 128)


def described(op: str, device: torch.device | str | None, given: Mapping[str, Any]) -> Call:
    """The call of an op with these operands and flags, checked as the op checks it.

    Args:
        op: its name.
        device: of the operands; None: the default device, or that of a tensor among ``given``.
        given: by argument. Operands: a tensor, a QuantizedStorage, a dtype, or text (``bf16``,
            ``e4m3/mxfp8/rowwise+columnwise``: format, scaling mode, copies; ``e4m3`` alone is per tensor, rowwise,
            ``e2m1`` alone nvfp4, rowwise).
            Flags: their values, or text. What is left out has the schema's default; an operand that must be there the
            first of bf16 and its own dtypes, a flag that must be there the first of its choices.

    Raises:
        ArgumentError, ArgumentTypeError: no op, argument, dtype or value of that name; or no call that the op takes.
    """
    if op not in SCHEMAS:
        raise ArgumentError("explain", got=f"op {op!r}", accepted=", ".join(SCHEMAS), todo="correct the name")
    schema = SCHEMAS[op]
    names = [name for name, _, _ in schema.signature]
    for name in given:
        if name not in names:
            raise ArgumentError(f"explain: {op}", got=f"{name!r}", accepted=", ".join(names), todo="correct the name")
    flags = {flag.name: _flag(schema, flag, given.get(flag.name, flag.default)) for flag in schema.flags}
    arguments = flags | {o.name: _operand(schema, o, given.get(o.name, REQUIRED), flags) for o in schema.operands}
    where = device if device is not None else next((v.device for v in given.values() if hasattr(v, "device")), None)
    return dataclasses.replace(
        describe_call(schema, arguments), device=default_device() if where is None else torch.device(where)
    )


def _operand(schema: OpSchema, operand: Operand, given: Any, flags: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """A stand-in without data."""
    if given is REQUIRED:
        goes_with = _PLAIN.get((schema.name, operand.name), {"": None})
        if operand.optional and not goes_with.items() <= flags.items():
            return None
        given = (
            torch.bfloat16 if torch.bfloat16 in operand.dtypes else (operand.dtypes or (operand.formats[0].name,))[0]
        )
    if isinstance(given, str):
        given = _named(schema, operand, given)
    if isinstance(given, (torch.Tensor, QuantizedStorage)):
        given = given.kind if isinstance(given, QuantizedStorage) else given.dtype
    made: Any = given
    if isinstance(given, StorageKind):
        made = QuantizedStorage.empty(given, _ONE_BLOCK, torch.bfloat16, _META)
    elif isinstance(given, torch.dtype):
        made = torch.empty((1,), dtype=given, device=_META)
    return [made] if operand.many and made is not None else made


def _named(schema: OpSchema, operand: Operand, text: str) -> torch.dtype | StorageKind | None:
    """What a text stands for."""
    if text.lower() == "none":
        return None
    name, *rest = text.split("/")
    if name.upper() in FORMATS and operand.formats and len(rest) <= len(_USUAL):
        usual = _USUAL_FP4 if name.upper() == E2M1.name else _USUAL
        mode, copies = (*rest, *usual[len(rest) :])
        parts = copies.split("+")
        if mode in _modes_of(name) and {*parts} <= {"rowwise", "columnwise"}:
            order = ColumnwiseOrder.TRANSPOSED
            kept = {copy: copy in parts for copy in ("rowwise", "columnwise")}
            return StorageKind.of(FORMATS[name.upper()], ScalingMode(mode), order=order, **kept)
    found = _dtype(text)
    if found not in operand.dtypes:
        formats = ", ".join(f"{fmt.name.lower()}[/mode[/copies]]" for fmt in operand.formats)
        accepted = ", ".join(filter(None, (*(short for short, d in _SHORT.items() if d in operand.dtypes), formats)))
        raise ArgumentError(
            f"explain: {schema.name}: {operand.name}", got=repr(text), accepted=accepted, todo="write one of these"
        )
    return found


def _modes_of(format_name: str) -> set[str]:
    """The scaling modes that go with a format: NVFP4's with E2M1, the others with FP8."""
    return {mode.value for mode in ScalingMode if (mode in NVFP4_MODES) is (format_name.upper() == E2M1.name)}


def _dtype(text: str) -> torch.dtype | None:
    found = _SHORT.get(text.lower()) or getattr(torch, text.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _flag(schema: OpSchema, flag: Flag, given: Any) -> Any:  # noqa: ANN401
    """The value of a flag. Numbers are no part of the question, so those left out stay so."""
    if given is REQUIRED:
        return flag.choices[0] if flag.choices else None
    if not isinstance(given, str):
        return given
    if given.lower() in _WORDS and given not in flag.choices:
        return _WORDS[given.lower()]
    if flag.type in (FlagType.DTYPE, FlagType.OPTIONAL_DTYPE):
        return _dtype(given) or given
    if flag.choices:
        return next((choice for choice in flag.choices if getattr(choice, "value", choice) == given), given)
    raise ArgumentError(
        f"explain: {schema.name}: {flag.name}",
        got=repr(given),
        accepted="to be left out: who runs a call does not depend on it" if not flag.keyed else "true, false",
        todo="leave it out" if not flag.keyed else "write one of these",
    )
