"""What a wrong result looks like: the right one of a call that is a little different, or a known mistake of casts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from te_hal.schema.formats import ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage
from te_hal.testing.axes import flag_axis
from te_hal.testing.case import Case, everyday, is_valid
from te_hal.testing.expectation import Expected, expected, expected_of
from te_hal.testing.finding import Finding, Kind
from te_hal.testing.judge import judge
from te_hal.testing.oracles import cast
from te_hal.testing.parts import Part, parts

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMERIC = (Kind.VALUES, Kind.NONFINITE)
_SIGN = 0x80


def diagnose(case: Case, found: dict[str, Any], findings: list[Finding]) -> list[Finding]:
    """The findings, those about values with a hint where one of the known explanations fits exactly."""
    if not any(finding.kind in _NUMERIC for finding in findings):
        return findings
    hint = next(_hints(case, found), "")
    if not hint:
        return findings
    return [dataclasses.replace(f, sentence=f"{f.sentence}; {hint}") if f.kind in _NUMERIC else f for f in findings]


def _hints(case: Case, found: dict[str, Any]) -> Iterator[str]:
    for axis, other in _without_each(case):
        if _fits(other, found, expected(other)):
            yield f"this is the result for {axis}={other.words[axis]}: {axis}={case.words[axis]} is ignored"
    twice = _scaled_twice(case)
    if twice is not None and _fits(case, found, twice):
        yield "this is the result with scale_inv applied twice"
    if case.op in ("quantize", "quantize_current"):
        yield from _hints_of_casts(case, found)


def _fits(case: Case, found: dict[str, Any], due: Expected) -> bool:
    """Whether the results are those, all of them; what is due beside them is left out."""
    if not set(found) <= {*due.exact, *due.bounded, *due.near}:
        return False
    common = dataclasses.replace(
        due,
        exact={name: value for name, value in due.exact.items() if name in found},
        bounded={name: value for name, value in due.bounded.items() if name in found},
        near={name: value for name, value in due.near.items() if name in found},
    )
    if any(value.value.shape != found[name].shape for name, value in common.bounded.items()):
        return False
    return not judge(case.words["values"], case.schema, found, common, fp8=False)[0]


def _without_each(case: Case) -> Iterator[tuple[str, Case]]:
    """The case with one flag, or one operand that may be left out, as in everyday calls."""
    flags = {flag_axis(case.schema, flag.name) for flag in case.schema.flags} - {"out_dtype", "dtype", "mode"}
    flags -= {"rowwise", "columnwise", "columnwise_order", case.schema.variant or ""}
    left_out = {operand.name for operand in case.schema.operands if operand.optional and not operand.written}
    usual = everyday(case.op)
    for axis in flags | left_out:
        if axis in case.words and case.words[axis] != usual[axis]:
            words = {**case.words, axis: usual[axis]}
            if is_valid(case.schema, words):
                yield axis, Case(case.op, words)


def _scaled_twice(case: Case) -> Expected | None:
    given = case.arguments()
    storages = {name: value for name, value in given.items() if isinstance(value, QuantizedStorage)}
    storages = {n: v for n, v in storages.items() if n != "out" and v.mode is not ScalingMode.MXFP8}
    if not storages:
        return None
    for name, storage in storages.items():
        row, row_factors, column, column_factors = storage.tensors()
        squared = [None if f is None else f.square() for f in (row_factors, column_factors)]
        given[name] = storage.with_tensors((row, squared[0], column, squared[1]))
    return expected_of(case.schema, given)


def _hints_of_casts(case: Case, found: dict[str, Any]) -> Iterator[str]:
    due = {part.label: part.tensor for part in _parts_due(case)}
    held = {part.label: part.tensor for name in ("output",) for part in parts(name, found[name])}
    wrong = [label for label, tensor in held.items() if label.endswith("_data") and not torch.equal(tensor, due[label])]
    if wrong and all(_only_ties_went_up(held[label], due[label]) for label in wrong):
        yield "every wrong code is the one above an even one that is due: ties are rounded away from zero"
    storage = found["output"]
    plain = storage.rowwise_data is not None and storage.mode not in NVFP4_MODES
    if wrong == ["output.columnwise_data"] and plain and _is_requantized(case, storage):
        yield "this is the cast of the rowwise copy's values: both copies are cast from the unquantized tensor"
    if wrong and all(_only_not_a_number(due[label], held[label]) for label in wrong):
        yield "every wrong code is one where NaN is due: NaN is dropped"


def _parts_due(case: Case) -> list[Part]:
    return parts("output", expected(case).exact["output"])


def _only_ties_went_up(found: torch.Tensor, due: torch.Tensor) -> bool:
    wrong = found != due
    return bool(((found[wrong].int() == due[wrong].int() + 1) & (due[wrong] % 2 == 0)).all())


def _only_not_a_number(due: torch.Tensor, found: torch.Tensor) -> bool:
    return bool((due[due != found] & ~_SIGN & 0xFF >= 0x7F).all())  # noqa: PLR2004 - C3's code


def _is_requantized(case: Case, storage: QuantizedStorage) -> bool:
    given = case.arguments()
    decoded = torch.from_numpy(cast.dequantized(storage, rowwise=True)).to(given["input"].dtype)
    settings = {"amax_epsilon": given["amax_epsilon"], "power_of_2": given["power_of_2"]}
    scale = None if given.get("scale") is None else np.float32(given["scale"].item())
    mode = storage.mode
    again = cast.quantized(
        decoded.float().numpy(), given["input"].dtype, storage.format, mode, scale=scale, rowwise=False, **settings
    )
    made, _ = cast.stored(storage, rowwise=False)
    return bool(np.array_equal(made, again.codes))
