"""Mode large: results with more than 2**31 elements, each a repetition of a small one whose value is known.

An operand's rows are repeated until something of the call has more elements than a 32-bit index reaches. Each row of
the result then equals that of the small call, which the cases of mode test have shown to be right; so neither an oracle
nor a second copy of the operands is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import ask_declared
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.formats import ColumnwiseOrder
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.validate import describe_call
from te_hal.testing.case import everyday
from te_hal.testing.execute import attempt
from te_hal.testing.expectation import named
from te_hal.testing.finding import Finding, Kind, Outcome, Status
from te_hal.testing.operands import arguments_of
from te_hal.testing.parts import unequal
from te_hal.testing.placement import place
from te_hal.testing.sizes import shapes_of
from te_hal.testing.timing import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from te_hal.schema.op import OpSchema
    from te_hal.testing.execute import Tested

#: The first index that 32 bits with a sign do not hold.
LIMIT = 2**31
#: Of the call that is repeated, by the number of sizes in the op's everyday shape. Of a product the result is largest.
_SHAPES = {1: "1024", 2: "64x1024", 3: "64x64x1024", 4: "4x2x64x256"}
#: Beside the everyday call.
_SETTINGS: dict[str, tuple[dict[str, str], ...]] = {
    "quantize": ({"columnwise": "true"}, {"columnwise": "true", "columnwise_order": "same"}),
    "gemm": ({"layout": "dgrad"},),
    "activation_fwd": ({"activation": "swiglu"},),
    "activation_bwd": ({"activation": "swiglu"},),
}
#: Elements that are compared at a time.
_CHUNK = 1 << 26
#: Bytes wanted, as a multiple of those of operands and results: kernels and comparing take some of their own.
_ROOM = 1.5
#: Of the bound: two results that are each within it, and the norm of a bound against single elements.
_APART = 8


class Repeated(NamedTuple):
    """A tensor of a result, and along which dimension it repeats; None: it is that of the small call."""

    label: str
    tensor: torch.Tensor
    axis: int | None


def check_large(tested: Tested, matches: Callable[[str], bool], limit: int = LIMIT) -> Iterator[Outcome]:
    """An outcome per op and setting, of the ops whose name matches and which repeat along their rows.

    Args:
        tested: the backend.
        matches: whether an op is wanted.
        limit: elements that the largest tensor of each call exceeds.
    """
    for op, schema in SCHEMAS.items():
        for words in ({}, *_SETTINGS.get(op, ())) if matches(op) else ():
            shape = _SHAPES[len(shapes_of(schema)[0].split("x"))]
            given = arguments_of(schema, {**everyday(op), **words, "shape": shape, "values": "normal"})
            if any(operand.many for operand in schema.operands) or not _repeating(schema, given):
                continue
            said = ",".join(f"{axis}={word}" for axis, word in words.items())
            yield _check(tested, schema, given, f"{op}:{said or 'everyday'}", limit)


def _check(tested: Tested, schema: OpSchema, given: dict[str, Any], case: str, limit: int) -> Outcome:
    small = place(schema, given, "dense", tested.device).arguments
    answer = ask_declared(tested.backend, describe_call(schema, small))
    if not answer:
        status = Status.COMPOSED if schema.optional else Status.UNSUPPORTED
        return Outcome(case, schema.name, status, reason=answer.sentence)
    result, trouble = attempt(tested, schema, small)
    if trouble:
        return _failed(case, schema, trouble)
    due = named(schema, result, small)
    names = _repeating(schema, small)
    largest = max(_elements(value) for name, value in (small | due).items() if name in names or name in due)
    times = limit // largest + 1
    if _free(tested.device) < _ROOM * times * sum(bytes_of(value) for value in (*small.values(), *due.values())):
        return Outcome(case, schema.name, Status.SKIPPED, reason=f"not enough memory for {times} repetitions")
    large = {name: _repeat(value, times) if name in names else value for name, value in small.items()}
    result, trouble = attempt(tested, schema, large)
    if trouble:
        return _failed(case, schema, f"{times} repetitions: {trouble}")
    found = named(schema, result, large)
    missing = [output.name for output in schema.outputs if output.name in due and output.name not in found]
    if missing:
        return _failed(case, schema, f"{times} repetitions: no result {', '.join(missing)}")
    findings = tuple(
        Finding(Kind.VALUES, sentence)
        for output in schema.outputs
        if output.name in due and (axis := _axis(schema, output.shape, given, names)) is not _SUMMED
        for one, other in zip(
            _tensors(output.name, due[output.name], axis), _tensors(output.name, found[output.name], axis), strict=True
        )
        for sentence in _compare(schema, one.tensor, other, times)
    )
    return Outcome(case, schema.name, Status.FAILED if findings else Status.PASSED, findings)


def _failed(case: str, schema: OpSchema, trouble: str) -> Outcome:
    return Outcome(case, schema.name, Status.FAILED, (Finding(Kind.ERROR, trouble),))


_SUMMED = -1


def _repeating(schema: OpSchema, given: Mapping[str, Any]) -> set[str]:
    """Operands whose rows are repeated: of leading dimensions, or of the M of a product that is no sum over it."""
    found: set[str] = set()
    for operand in schema.operands:
        rule = schema.shape_rule(operand.shape, given.get(schema.variant or ""))
        is_rows = rule.startswith(("...", "M ")) or rule.removeprefix("*") in found
        if is_rows and given[operand.name] is not None:
            found.add(operand.name)
    return found


def _axis(schema: OpSchema, shape: Any, given: Mapping[str, Any], names: set[str]) -> int | None:  # noqa: ANN401
    """Along which dimension a result repeats; None: it does not; _SUMMED: it is a sum over what repeats."""
    rule = schema.shape_rule(shape, given.get(schema.variant or ""))
    if rule == "1":
        return None
    return 0 if rule.startswith(("...", "M ")) or rule.removeprefix("*") in names else _SUMMED


def _repeat(value: Any, times: int) -> Any:  # noqa: ANN401 - a tensor or a storage
    if isinstance(value, torch.Tensor):
        return value.repeat(times, *[1] * (value.dim() - 1))
    shape = (value.shape[0] * times, *value.shape[1:])
    made = QuantizedStorage.empty(value.kind, shape, value.dtype, value.device)
    for target, source in zip(_tensors("", made, 0), _tensors("", value, 0), strict=True):
        target.tensor.copy_(source.tensor if target.axis is None else _repeat(source.tensor, times))
    return made


def _tensors(name: str, value: Any, axis: int | None) -> list[Repeated]:  # noqa: ANN401
    """Of a result: a tensor; or the codes and factors of a storage with per-tensor scaling."""
    if isinstance(value, torch.Tensor):
        return [Repeated(name, value, axis)]
    row, row_factor, column, column_factor = value.tensors()
    turned = value.kind.order is ColumnwiseOrder.TRANSPOSED
    found = [(row, 0), (column, 1 if turned else 0), (row_factor, None), (column_factor, None)]
    return [Repeated(name, tensor, place) for tensor, place in found if tensor is not None]


def _compare(schema: OpSchema, due: torch.Tensor, found: Repeated, times: int) -> list[str]:
    """What is wrong with a repetition of ``due``."""
    if found.axis is None:
        return [] if _agree(schema, due, found.tensor) else [f"{found.label} is not that of the small call"]
    split = (*due.shape[: found.axis], times, *due.shape[found.axis :])
    pieces = found.tensor.view(split).movedim(found.axis, 0)
    step = max(1, _CHUNK // max(1, due.numel()))
    for start in range(0, times, step):
        some = pieces[start : start + step]
        if _agree(schema, due.expand_as(some), some):
            continue
        first = next(index for index, piece in enumerate(some) if not _agree(schema, due, piece)) + start
        return [f"{found.label}: repetition {first} of {times} differs, from row {first * due.shape[found.axis]} on"]
    return []


def _agree(schema: OpSchema, due: torch.Tensor, found: torch.Tensor) -> bool:
    if schema.contract.exact or not due.is_floating_point() or due.element_size() == 1:
        differ = unequal(found.contiguous(), due.contiguous()).sum()
        return int(differ) <= (schema.contract.codes_off or 0.0) * found.numel()
    allowed = _APART * max(schema.contract.bound.values(), default=0.0) * float(due.abs().max())
    return bool(torch.isclose(found.float(), due.float(), rtol=0.0, atol=allowed, equal_nan=True).all())


def _elements(value: Any) -> int:  # noqa: ANN401 - an operand or a result
    return int(value.numel()) if isinstance(value, (torch.Tensor, QuantizedStorage)) else 0


def _free(device: torch.device) -> int:
    """Bytes that can be had. On a host what the system calls available, as its caches give way."""
    if device.type == "cpu":
        known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        return int(known["MemAvailable"].split()[0]) * 1024
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free)
