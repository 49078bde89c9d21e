"""Whether two results of one call keep the op's contract: first a quick look, then the conformance kit's judgement.

Bytes that are fixed must be equal. What may be off by a bound is first held against the reference's result; where
that does not settle it (the reference was rounded too, and sums may cancel) the kit's own oracle computes the call in
float64 and judges element by element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import use_observer
from te_hal.schema.storage import QuantizedStorage
from te_hal.testing.expectation import Expected, expected_of, named
from te_hal.testing.judge import judge
from te_hal.testing.parts import parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.schema.op import OpSchema

#: Contracts' bounds are those of norms. One element of a right result is off by at most this many of them, measured
#: by the larger of its own size and the root mean square: one step of bf16 is 3.4 of bf16's.
_ELEMENT = 4.0
#: From so many results on the bound on the norm says something.
_ENOUGH = 256
#: The name of no pattern of values: bounds on norms hold for random operands, and are left out.
_REAL_DATA = "real"


def disagreements(
    schema: OpSchema, found: Mapping[str, Any], due: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[str, ...]:
    """What is wrong with a result, a sentence each; none where it keeps the contract.

    Args:
        schema: the op.
        found: results and written operands by name, on the CPU.
        due: the reference's, on the CPU.
        given: every argument by name as it was before the call, on the CPU. Nothing is written to it.
    """
    if found.keys() != due.keys():
        return (f"results {', '.join(sorted(found))}; due are {', '.join(sorted(due))}",)
    shapes = _shapes_differ(found, due)
    if shapes:
        return shapes
    contract = schema.contract
    if contract.exact:
        return _judged(schema, found, Expected(exact=dict(due)))
    near = {n: v for n, v in due.items() if contract.codes_off is not None and (_is_storage(v) or n == "amax")}
    findings = _judged(schema, {n: found[n] for n in near}, Expected(near=near))
    bounded = [name for name in due if name not in near]
    if findings or all(_close(found[name], due[name], contract.bound) for name in bounded):
        return findings
    with use_observer(None):
        expected = expected_of(schema, {name: copied(value) for name, value in given.items()})
    rest = {name: value for name, value in expected.bounded.items() if name in bounded}
    return _judged(schema, found, Expected(bounded=rest, source=expected.source), given)


def _is_storage(value: object) -> bool:
    return isinstance(value, QuantizedStorage)


def _shapes_differ(found: Mapping[str, Any], due: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for name, value in due.items():
        for mine, theirs in zip(_parts(name, found[name]), _parts(name, value), strict=False):
            if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
                got, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (mine, theirs))
                sentences.append(f"{name} is {got}; due is {wanted}")
        if _kind(found[name]) != _kind(value):
            sentences.append(f"{name} is {_kind(found[name])}; due is {_kind(value)}")
    return tuple(sentences)


def _parts(name: str, value: Any) -> list[torch.Tensor]:  # noqa: ANN401 - a tensor or a storage
    return [part.tensor for part in parts(name, value)]


def _kind(value: Any) -> str:  # noqa: ANN401
    return repr(value.kind) if isinstance(value, QuantizedStorage) else "a tensor"


def _judged(
    schema: OpSchema, found: Mapping[str, Any], due: Expected, given: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    operands = [value for value in (given or {}).values() if isinstance(value, QuantizedStorage)]
    findings, _ = judge(_REAL_DATA, schema, dict(found), due, fp8=len(operands) > 1)
    return tuple(finding.sentence for finding in findings)


def _close(found: torch.Tensor, due: torch.Tensor, bound: Mapping[torch.dtype, float]) -> bool:
    """Whether a result is so close to the reference's that there is nothing to settle."""
    if torch.equal(found, due):
        return True
    if due.dtype not in bound:
        return False
    wide = torch.float64 if due.dtype == torch.float32 else torch.float32
    mine, theirs = found.to(wide), due.to(wide)
    distance = (mine - theirs).abs_()
    if not distance.sum().isfinite():
        finite = mine.isfinite() & theirs.isfinite()
        if ((mine != theirs) & ~(mine.isnan() & theirs.isnan()) & ~finite).any():
            return False
        distance, theirs = distance[finite], theirs[finite]
    allowed, norm = bound[due.dtype], theirs.norm()
    if theirs.numel() >= _ENOUGH and distance.norm() > allowed * norm:
        return False
    smallest = float(norm) / max(theirs.numel(), 1) ** 0.5
    return not bool((distance > theirs.abs().clamp_(min=smallest).mul_(_ELEMENT * allowed)).any())


def copied(value: Any) -> Any:  # noqa: ANN401 - any argument of an op
    """The value on the CPU, sharing no memory; what is no tensor is returned as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, QuantizedStorage):
        return value.with_tensors(tuple(None if t is None else copied(t) for t in value.tensors()))
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return value


def results_by_name(schema: OpSchema, result: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """Results and written operands by name, copied to the CPU; `out`, where it is the result, once."""
    found = named(schema, result, dict(arguments))
    seen = {id(value) for output in schema.outputs if (value := found.get(output.name)) is not None}
    results = {output.name for output in schema.outputs}
    return {name: copied(value) for name, value in found.items() if name in results or id(value) not in seen}
