"""Runs a benchmark: the device's ceilings, every call beside them, and FP8 beside bf16."""

from __future__ import annotations

import datetime as dt
import platform
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from te_hal import ops
from te_hal._version import __version__
from te_hal.cli.bench_fp8 import fp8_rows
from te_hal.cli.bench_outcome import outcome_of
from te_hal.cli.failure import STEP_FAILURES
from te_hal.cli.place import device_name
from te_hal.dispatch import verdict
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.validate import describe_call
from te_hal.testing.timing import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_hal.cli.bench_cases import BenchCase, Maker
    from te_hal.cli.bench_clock import Clock
    from te_hal.cli.bench_shapes import Size

#: What a record says it is.
KIND, VERSION = "te_hal bench", 1
_GIGA, _TERA = 1e9, 1e12
#: Measurements of each ceiling, of which the best counts.
_CEILING_RUNS = 3
#: Bytes of the copied tensor and side of the multiplied matrices, on a CPU and elsewhere.
_COPY = {True: 2**27, False: 2**30}
_SIDE = {True: 1024, False: 8192}


def run_bench(
    maker: Maker, clock: Clock, size: Size, cases: Sequence[BenchCase], heard: Callable[[str], None]
) -> dict[str, Any]:
    """Time everything; the record, as plain values.

    Args:
        maker: for the backend in force and its device.
        clock: times the calls.
        size: what was asked for.
        cases: the calls.
        heard: called with the name of what comes next.
    """
    heard("ceilings")
    ceilings = measure_ceilings(maker, clock)
    rows = []
    for case in cases:
        heard(case.id)
        rows.append(_row(maker, clock, case, ceilings))
    heard("fp8 beside bf16")
    return {
        "kind": KIND,
        "version": VERSION,
        "date": dt.datetime.now(tz=dt.timezone.utc).isoformat(timespec="seconds"),
        "backend": maker.backend.name,
        "device": device_name(maker.device),
        "threads": torch.get_num_threads(),
        "timed_by": clock.kind,
        "versions": {"te_hal": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "size": {"models": list(size.models), "tokens": size.tokens, "quick": size.quick},
        "ceilings": ceilings,
        "rows": rows,
        "fp8": fp8_rows(maker, clock, size) if any(case.op == "gemm" for case in cases) else None,
    }


def measure_ceilings(maker: Maker, clock: Clock) -> dict[str, float]:
    """What this device does at best: torch's copy in GB/s, read and written, and its bf16 product in TFLOP/s."""
    slow = maker.device.type == "cpu"
    return {
        "copy_gb_per_s": 2 * _COPY[slow] / _copy_us(maker.device, clock, _COPY[slow]) * 1e6 / _GIGA,
        "gemm_tflop_per_s": 2 * _SIDE[slow] ** 3 / _product_us(maker, clock, _SIDE[slow]) * 1e6 / _TERA,
    }


def _copy_us(device: torch.device, clock: Clock, count: int) -> float:
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return min(clock.measure(lambda: target.copy_(source)).least_us for _ in range(_CEILING_RUNS))


def _product_us(maker: Maker, clock: Clock, side: int) -> float:
    a, b = maker.normal(side, side), maker.normal(side, side)
    return min(clock.measure(lambda: a @ b).least_us for _ in range(_CEILING_RUNS))


def _row(maker: Maker, clock: Clock, case: BenchCase, ceilings: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"id": case.id, "op": case.op, "variant": case.variant, "shape": case.shape}
    try:
        arguments = case.make(maker)
        call = partial(_call, case.op, arguments)
        timing = clock.measure(call)
        row["runs"] = _runs(case.op, arguments)
        moved = sum(map(bytes_of, (*arguments.values(), call())))
    except STEP_FAILURES as error:
        word, why = outcome_of(error)
        return {**row, word: why}
    row |= {"us": timing.median_us, "least_us": timing.least_us, "timed": timing.runs}
    if case.operations:
        rate = case.operations / timing.median_us * 1e6 / _TERA
        return {**row, "tflop_per_s": rate, "of_ceiling": rate / ceilings["gemm_tflop_per_s"]}
    rate = moved / timing.median_us * 1e6 / _GIGA
    return {**row, "gb_per_s": rate, "of_ceiling": rate / ceilings["copy_gb_per_s"]}


def _call(op: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - as the op has it
    """The public op, as a user calls it."""
    positional, keywords = SCHEMAS[op].split(arguments)
    return getattr(ops, op)(*positional, **keywords)


def _runs(op: str, arguments: dict[str, Any]) -> str:
    """What ran the call: "kernel", "composition" or "fallback"."""
    given = {name: default for name, _, default in SCHEMAS[op].signature} | arguments
    return verdict(describe_call(SCHEMAS[op], given)).runs.value
