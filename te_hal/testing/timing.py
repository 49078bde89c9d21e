"""Mode perf: how long the everyday call of each op takes at a size that fills a device, in us and GB/s."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import ask_declared
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.validate import describe_call
from te_hal.testing.case import everyday
from te_hal.testing.execute import invoke
from te_hal.testing.operands import arguments_of
from te_hal.testing.placement import place
from te_hal.testing.sizes import shapes_of
from te_hal.testing.streams import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_hal.testing.execute import Tested

#: By the number of sizes in the op's everyday shape.
_SIZES = {1: "1048576", 2: "1024x1024", 3: "512x1024x512", 4: "2x4x256x256"}
_SECONDS, _MOST = 0.2, 200


class Timing(NamedTuple):
    """One measurement.

    Attributes:
        op: name of the op.
        shape: sizes, as in a case's id.
        microseconds: of one call, the median.
        gigabytes_per_second: bytes of operands and results over that time.
    """

    op: str
    shape: str
    microseconds: float
    gigabytes_per_second: float


def timings(tested: Tested, matches: Callable[[str], bool]) -> Iterator[Timing]:
    """A measurement per op whose name matches and which the backend has a kernel for."""
    for op, schema in SCHEMAS.items():
        if not matches(op):
            continue
        shape = _SIZES[len(shapes_of(schema)[0].split("x"))]
        given = arguments_of(schema, {**everyday(op), "shape": shape})
        arguments = place(schema, given, "dense", tested.device).arguments
        if not ask_declared(tested.backend, describe_call(schema, arguments)):
            continue
        seconds, result = _median(tested, op, arguments)
        moved = sum(
            bytes_of(value) for value in (*arguments.values(), *(result if isinstance(result, tuple) else (result,)))
        )
        yield Timing(op, shape, seconds * 1e6, moved / seconds / 1e9)


def _median(tested: Tested, op: str, arguments: dict[str, Any]) -> tuple[float, Any]:
    schema = SCHEMAS[op]
    result = invoke(tested.backend, schema, arguments)
    wait_for(tested.device)
    spans: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(spans) < _MOST and (time.perf_counter() < until or not spans):
        begun = time.perf_counter()
        result = invoke(tested.backend, schema, arguments)
        wait_for(tested.device)
        spans.append(time.perf_counter() - begun)
    return sorted(spans)[len(spans) // 2], result


def bytes_of(value: Any) -> int:  # noqa: ANN401 - an operand or a result
    """Of a tensor, of all buffers of a storage, of all in a list; 0 of anything else."""
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    if isinstance(value, QuantizedStorage):
        return sum(map(bytes_of, value.tensors()))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
