"""`te-hal explain`: who would run an op, and why; without one, who runs each op."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import typer

import te_hal
from te_hal.cli.failure import wrong_input_ends
from te_hal.explaining import OpExplanation, explain
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError


def explain_command(
    op: Annotated[
        str | None, typer.Argument(help="An op of docs/ops.md; without one: every op in its plainest call.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Operands and flags, name=value: a=e4m3 b=bf16 layout=dgrad input=e4m3/mxfp8."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help='One of "te-hal backends"; default: the one in force.')] = None,
    device: Annotated[str | None, typer.Option(help="Device of the operands; default: torch's default device.")] = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A policy in TOML (docs/backends.md); default: the one in force."),
    ] = None,
    why_not: Annotated[bool, typer.Option("--why-not", help="Only why other backends do not run it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Say which backend and which kernel would run an op, and why each other backend would not. Nothing is launched."""
    with (
        wrong_input_ends(),
        nullcontext() if backend is None else te_hal.use_backend(backend),
        nullcontext() if policy is None else te_hal.use_policy(te_hal.read_policy(policy)),
    ):
        if why_not:
            reasons = te_hal.why_not(_named(op), device=device, **_pairs(arguments or []))
            print(json.dumps(reasons.as_dict(), indent=1) if as_json else reasons)
            return
        if op is not None:
            found = [explain(op, device=device, **_pairs(arguments or []))]
        else:
            found = [explain(name, device=device) for name in SCHEMAS]
    if as_json:
        rows = [each.as_dict() for each in found]
        print(json.dumps(rows if op is None else rows[0], indent=1))
    else:
        print(found[0] if op is not None else _table(found))


def _named(op: str | None) -> str:
    if op is None:
        raise ArgumentError(
            "te-hal explain", got="--why-not", accepted="an op beside it", todo="name one of docs/ops.md"
        )
    return op


def _pairs(arguments: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in arguments:
        name, _, value = text.partition("=")
        if not (name and value):
            raise ArgumentError("te-hal explain", got=repr(text), accepted="name=value", todo="write a=bf16")
        if name in pairs:
            got = f"{name}={pairs[name]} and {text}"
            raise ArgumentError("te-hal explain", got=got, accepted="each name once", todo="leave one out")
        pairs[name] = value
    return pairs


def _table(found: list[OpExplanation]) -> str:
    width = max(len(each.call.op) for each in found)
    return "\n".join(f"{each.call.op:<{width}}  {each.in_short()}" for each in found)
