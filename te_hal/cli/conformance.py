"""`te-hal conformance`: does a backend do what the ops' schemas say; a certificate if it does."""

from __future__ import annotations

import enum
import json
import sys
from collections import Counter
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from te_hal.cli.atomic import check_writable, write_atomically
from te_hal.cli.failure import FAILED, WRONG_INPUT, fail, wrong_input_ends
from te_hal.dispatch import ask_declared
from te_hal.schema.validate import describe_call
from te_hal.testing.certificate import certify
from te_hal.testing.finding import Status
from te_hal.testing.gradients import check_gradients
from te_hal.testing.large import check_large
from te_hal.testing.placement import place
from te_hal.testing.report import describe
from te_hal.testing.session import chosen_cases, chosen_ops, conformance
from te_hal.testing.subject import Subject
from te_hal.testing.timing import timings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from te_hal.testing.finding import Outcome

_EVERY = 100


class Mode(str, enum.Enum):
    """What is done with the cases."""

    TEST = "test"
    GRAD = "grad"
    PERF = "perf"
    SUPPORT = "support"
    LARGE = "large"


#: Options of the other modes; whatever else is given is refused.
_FOR_TESTS_ALONE = {
    "case": "--case",
    "quick": "--quick",
    "jobs": "--jobs",
    "timeout": "--timeout",
    "as_json": "--json",
}


def conformance_command(
    context: typer.Context,
    backend: Annotated[str, typer.Option(help="Backend to test.")],
    op: Annotated[str, typer.Option(metavar="REGEX", help="Only ops whose whole name matches.")] = ".*",
    case: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this case; may be repeated.")] = None,
    mode: Annotated[
        Mode, typer.Option(help="Run the cases; check slopes; measure time; only ask; pass 2^31 elements.")
    ] = Mode.TEST,
    quick: Annotated[bool, typer.Option("--quick", help="Every value once, instead of every pair.")] = False,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=0, help="Worker processes; 0: none.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a case may take.")] = 60.0,
    device: Annotated[str, typer.Option(help="Where the tensors lie; default: the backend's first device.")] = "",
    factory: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="Makes a backend without entry point.")] = "",
    lists: Annotated[str, typer.Option(metavar="FOLDER", help="Where unsupported.toml and xfail.toml are.")] = "",
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the certificate.")] = None,
) -> None:
    """Hold a backend against the ops' schemas, the kit's own oracles and a list of hard values."""
    subject = Subject(backend, device, factory, lists)
    if mode is not Mode.TEST:
        given = [option for name, option in _FOR_TESTS_ALONE.items() if _is_given(context, name)]
        if given:
            fail(f"{' and '.join(given)} go with --mode test", WRONG_INPUT)
        with wrong_input_ends():
            _OTHER_MODES[mode](subject, op)
        return
    with wrong_input_ends():
        check_writable("te-hal conformance: --json", as_json)
        session = conformance(
            subject, op=op, ids=case or (), quick=quick, jobs=jobs, timeout=timeout, heard=_Progress()
        )
    print(describe(session))
    if as_json is not None:
        write_atomically(as_json, (json.dumps(certify(session), indent=1) + "\n").encode())
    if not session.clean:
        raise typer.Exit(FAILED)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


class _Progress:
    """Says on stderr, where somebody looks at it, how many cases are done."""

    def __init__(self) -> None:
        self._done = 0

    def __call__(self, outcome: Outcome) -> None:
        self._done += 1
        if sys.stderr.isatty() and self._done % _EVERY == 0:
            print(f"\r{self._done} cases, at {outcome.op}", end="\033[K\r", file=sys.stderr)


def _gradients(subject: Subject, op: str) -> None:
    _tell(check_gradients(subject.prepare(), _among(op)), f"gradients of backend {subject.backend} are wrong")


def _large(subject: Subject, op: str) -> None:
    _tell(check_large(subject.prepare(), _among(op)), f"calls of backend {subject.backend} are wrong beyond 2^31")


def _among(op: str) -> Callable[[str], bool]:
    return frozenset(chosen_ops(op)).__contains__


def _tell(outcomes: Iterable[Outcome], wrong: str) -> None:
    """A line per outcome; the exit code says whether one failed, or there was none."""
    counts: Counter[Status] = Counter()
    for outcome in outcomes:
        said = "; ".join(map(str, outcome.findings)) or outcome.reason
        measured = "" if outcome.error is None else f"{outcome.error:.0%} of what is allowed"
        print(f"{outcome.status.value}  {outcome.case}  {measured}{said}".rstrip())
        counts[outcome.status] += 1
    if counts[Status.FAILED]:
        fail(f"{counts[Status.FAILED]} {wrong}", FAILED)
    if not counts:
        fail("no op among those of --op that this mode checks", WRONG_INPUT)


def _timings(subject: Subject, op: str) -> None:
    print(f"{'op':28}{'shape':>16}{'us':>12}{'GB/s':>10}")
    for found in timings(subject.prepare(), _among(op)):
        print(f"{found.op:28}{found.shape:>16}{found.microseconds:>12.1f}{found.gigabytes_per_second:>10.2f}")


def _support(subject: Subject, op: str) -> None:
    """A line per case: yes, or the reason; as CSV."""
    tested = subject.prepare()
    print("case,supported,reason")
    for case in chosen_cases(op, (), quick=False, streams=False):
        placed = place(case.schema, case.arguments(), "dense", tested.device)
        answer = ask_declared(tested.backend, describe_call(case.schema, placed.arguments))
        sentence = answer.sentence.replace('"', "'")
        print(f'"{case.id}",{"yes" if answer else answer.code.value},"{sentence}"')


_OTHER_MODES = {Mode.GRAD: _gradients, Mode.PERF: _timings, Mode.SUPPORT: _support, Mode.LARGE: _large}
