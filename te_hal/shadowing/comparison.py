"""One call on both sides: the backend's kernel as ever, the reference's on copies on the CPU, and the judgement."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import resolve
from te_hal.schema.catalog import SCHEMAS
from te_hal.shadowing.agreement import copied, disagreements, results_by_name
from te_hal.testing.expectation import misfit

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.dispatch import Selection
    from te_hal.schema.op import OpSchema
    from te_hal.schema.support import Call

    Kernel = Callable[..., Any]

_CPU = torch.device("cpu")


class Outcome(NamedTuple):
    """What came of a call on both sides.

    Attributes:
        result: the backend's, untouched.
        given: every argument by name as before the call, on the CPU.
        found: the backend's results and written operands by name, on the CPU.
        findings: what is wrong with them, a sentence each.
        seconds: that all of this took beside the kernel itself.
    """

    result: Any
    given: dict[str, Any]
    found: dict[str, Any]
    findings: tuple[str, ...]
    seconds: float


def reference_kernel(call: Call, reference: Selection) -> Kernel:
    """The kernel of the reference for a call, on the CPU.

    Raises:
        UnsupportedError, BackendUnavailableError: the reference has none.
    """
    return resolve(dataclasses.replace(call, device=_CPU), reference).kernel


def arguments_of(schema: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of a kernel by name, with the schema's defaults."""
    names = [name for name, _, _ in schema.signature]
    defaults = {name: default for name, _, default in schema.signature}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


@torch.no_grad()
def compare(op: str, kernel: Kernel, reference: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """Run a call on both sides.

    Args:
        op: its name.
        kernel: the backend's.
        reference: the reference's, for the CPU.
        args: of the kernel; written operands are written by the backend alone.
        kwargs: the same.
    """
    schema = SCHEMAS[op]
    began = time.perf_counter()
    arguments = arguments_of(schema, args, kwargs)
    given = {name: copied(value) for name, value in arguments.items()}
    before = time.perf_counter()
    result = kernel(*args, **kwargs)
    after = time.perf_counter()
    problem = misfit(schema, result)
    if problem:
        return Outcome(result, given, {}, (problem,), time.perf_counter() - after + before - began)
    found = results_by_name(schema, result, arguments)
    own = {name: copied(value) for name, value in given.items()}
    due = results_by_name(schema, reference(**own), own)
    findings = disagreements(schema, found, due, given)
    return Outcome(result, given, found, findings, time.perf_counter() - after + before - began)
