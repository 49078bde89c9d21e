"""`te-hal bench`: how fast a backend's ops are, beside what the device can do, and from which sizes FP8 pays."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

import te_hal
from te_hal.cli.atomic import check_writable, write_atomically
from te_hal.cli.bench_cases import BenchCase, Maker, bench_cases
from te_hal.cli.bench_clock import Clock
from te_hal.cli.bench_outcome import FAILED as FAILED_CALL
from te_hal.cli.bench_record import compare_records, read_record
from te_hal.cli.bench_run import run_bench
from te_hal.cli.bench_shapes import MODELS, Size, size_for
from te_hal.cli.bench_text import comparison_lines, record_lines
from te_hal.cli.failure import FAILED, wrong_input_ends
from te_hal.cli.threads import MOST_THREADS, WORTH_SHARING, torch_threads
from te_hal.dispatch import backend_for
from te_hal.modules.device import parameter_device
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Defaults of --seconds and --threshold.
_SECONDS, _THRESHOLD = 0.1, 0.1


def bench(
    backend: Annotated[str | None, typer.Option(help='One of "te-hal backends"; default: the one in force.')] = None,
    device: Annotated[str | None, typer.Option(help="Where the calls run; default: the backend's.")] = None,
    op: Annotated[str, typer.Option(metavar="REGEX", help="Only ops whose whole name matches.")] = ".*",
    model: Annotated[list[str] | None, typer.Option(help=f"Sizes of {', '.join(MODELS)}; may be repeated.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Rows of every activation.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One model, few products: seconds on a CPU.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, max=MOST_THREADS, help="Of torch, on a CPU.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help=f"That one measurement may take; default: {_SECONDS}.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record.")] = None,
    record: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Measure nothing: take this record.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with this record; exit code 1 if a call is slower.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0.0, help=f"Share of its time by which a call may be slower; default: {_THRESHOLD}."),
    ] = None,
) -> None:
    """Time ops over the sizes of common language models: us, GB/s or TFLOP/s, and the share of a measured ceiling."""
    with wrong_input_ends(), nullcontext() if backend is None else te_hal.use_backend(backend):
        before = _before(against, threshold)
        if record is not None:
            given: dict[str, object] = {
                "--backend": backend,
                "--device": device,
                "--model": model,
                "--tokens": tokens,
                "--json": as_json,
            }
            given |= {"--threads": threads, "--seconds": seconds, "--quick": quick or None}
            _refuse_beside_record(given | {"--op": None if op == ".*" else op})
            found = read_record(record)
        else:
            check_writable("te-hal bench: --json", as_json)
            with torch_threads(threads, WORTH_SHARING):
                found = _measure(device, op, tuple(model or ()), tokens, seconds or _SECONDS, quick=quick)
    if as_json is not None:
        write_atomically(as_json, (json.dumps(found, indent=1) + "\n").encode())
    if not _show(found, before, _THRESHOLD if threshold is None else threshold):
        raise typer.Exit(FAILED)


def _before(against: Path | None, threshold: float | None) -> dict[str, Any] | None:
    """The record to compare with."""
    if against is not None:
        return read_record(against)
    if threshold is not None:
        raise ArgumentError(
            "te-hal bench: --threshold",
            got=f"{threshold:g} alone",
            accepted="--against beside it",
            todo="name a record",
        )
    return None


def _show(found: dict[str, Any], before: dict[str, Any] | None, threshold: float) -> bool:
    """Print a record, and how it compares; whether every call ran, and none is slower."""
    print(*record_lines(found), sep="\n")
    widths = [] if found["fp8"] is None else found["fp8"]["rows"]
    right = not any(FAILED_CALL in row for row in found["rows"]) and not any(row[FAILED_CALL] for row in widths)
    if before is None:
        return right
    compared = compare_records(found, before, threshold)
    print(*comparison_lines(compared, threshold), sep="\n")
    return right and not compared.slower


def _measure(
    device: str | None, op: str, models: tuple[str, ...], tokens: int | None, seconds: float, *, quick: bool
) -> dict[str, Any]:
    for name in models:
        if name not in MODELS:
            raise ArgumentError("te-hal bench: --model", got=repr(name), accepted=", ".join(MODELS), todo="name one")
    where = parameter_device(device, "te-hal bench: --device")
    size = size_for(where, models, tokens, quick=quick)
    cases = _chosen(size, op)
    maker = Maker(backend_for(where, "gemm"), where)
    torch.manual_seed(0)
    with torch.no_grad():
        return run_bench(maker, Clock(where, seconds), size, cases, _say)


def _chosen(size: Size, op: str) -> Sequence[BenchCase]:
    cases = bench_cases(size)
    try:
        chosen = [case for case in cases if re.fullmatch(op, case.op)]
    except re.error as error:
        raise ArgumentError(
            "te-hal bench: --op", got=f"{op!r}: {error}", accepted="a regular expression", todo="correct it"
        ) from error
    if not chosen:
        names = ", ".join(dict.fromkeys(case.op for case in cases))
        raise ArgumentError("te-hal bench: --op", got=repr(op), accepted=names, todo="name at least one op")
    return chosen


def _refuse_beside_record(given: dict[str, object]) -> None:
    """What is about measuring means nothing where nothing is measured."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ArgumentError(
            "te-hal bench: --from",
            got=", ".join(names),
            accepted="--against and --threshold beside it",
            todo="leave it out",
        )


def _say(what: str) -> None:
    """On stderr, where somebody looks at it."""
    if sys.stderr.isatty():
        print(f"\r{what}", end="\033[K\r", file=sys.stderr)
