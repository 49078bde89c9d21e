"""Runs a saved call again, alone: on the backend that differed or another one, and on the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import Policy, Selection, resolve, use_backend, use_observer
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.validate import describe_call
from te_hal.shadowing.agreement import results_by_name
from te_hal.shadowing.call_file import read_call
from te_hal.shadowing.comparison import compare, reference_kernel
from te_hal.testing.expectation import misfit
from te_hal.testing.parts import parts, unequal

if TYPE_CHECKING:
    from pathlib import Path

    from te_hal.shadowing.call_file import SavedCall

_WHERE = "te_hal.shadowing.replay"


@dataclass(frozen=True)
class Replay:
    """What came of a saved call.

    Attributes:
        saved: what the file holds.
        backend: that ran it now.
        findings: what is wrong with the result, a sentence each; none where it keeps the contract.
        as_saved: the result has the bytes of the one in the file.
        steady: two runs gave the same bytes.
    """

    saved: SavedCall
    backend: str
    findings: tuple[str, ...]
    as_saved: bool
    steady: bool

    def __str__(self) -> str:
        about = self.saved.about
        place = f"step {about['step']}, {about['layer'] or 'unknown layer'}, {about['direction']}"
        lines = [
            f"{about['call']}",
            f"case {about['case']}" if about["case"] else "the conformance kit has no such case",
            f"saved in {place}, on {self.saved.backend} beside {self.saved.reference}",
            *(f"  then: {sentence}" for sentence in about["findings"]),
            f"now on {self.backend}:",
            *(f"  {sentence}" for sentence in self.findings or ("keeps its contract",)),
            f"  {'the bytes of the saved result' if self.as_saved else 'other bytes than the saved result'}",
        ]
        return "\n".join(lines if self.steady else [*lines, "  two runs gave different bytes"])


def replay(path: Path, backend: str | None = None) -> Replay:
    """Run a saved call twice on a backend and once on the reference. Nothing in the file is run.

    Args:
        path: a file that te_hal.shadow wrote.
        backend: None: the one that it was saved from.

    Raises:
        CheckpointError: no such file.
        BackendNotFoundError, BackendUnavailableError: of the backend or the reference, on this machine.
        UnsupportedError: one of them does not take the call.
    """
    saved = read_call(path)
    name = backend or saved.backend
    schema = SCHEMAS[saved.op]
    with use_backend(saved.reference), use_backend(name), use_observer(None):
        device = torch.device(saved.device)
        first, second = ({n: _on(value, device) for n, value in saved.arguments.items()} for _ in range(2))
        call = describe_call(schema, first)
        kernel = resolve(call, Selection(name, _WHERE, Policy(), _WHERE, counted=False)).kernel
        reference = reference_kernel(call, Selection(saved.reference, _WHERE, Policy(), _WHERE, counted=False))
        outcome = compare(saved.op, kernel, reference, (), first)
        result = kernel(**second)
        again = {} if misfit(schema, result) else results_by_name(schema, result, second)
    return Replay(
        saved=saved,
        backend=name,
        findings=outcome.findings,
        as_saved=_same(outcome.found, saved.found),
        steady=_same(outcome.found, again),
    )


def _on(value: Any, device: torch.device) -> Any:  # noqa: ANN401 - any argument of an op
    """A copy on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, QuantizedStorage):
        return value.with_tensors(tuple(None if t is None else _on(t, device) for t in value.tensors()))
    if isinstance(value, (list, tuple)):
        return type(value)(_on(item, device) for item in value)
    return value


def _same(found: dict[str, Any], other: dict[str, Any]) -> bool:
    return found.keys() == other.keys() and all(
        mine.tensor.shape == theirs.tensor.shape and not bool(unequal(mine.tensor, theirs.tensor).any())
        for name in found
        for mine, theirs in zip(parts(name, found[name]), parts(name, other[name]), strict=False)
    )
