"""compare.json: every number of a comparison, and what it was made with."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from te_hal.cli.atomic import write_atomically
from te_hal.cli.verdict import difference, noise

if TYPE_CHECKING:
    from pathlib import Path

    from te_hal.cli.results import RunResult
    from te_hal.cli.summary import Summary

_FORMAT = 1


def write_record(path: Path, summary: Summary) -> None:
    """Write the comparison as strict JSON: a number that is NaN or infinite is null there.

    Raises:
        OSError: nothing was written.
    """
    record = {
        "format": _FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "finished": summary.finished,
        "config": summary.identity,
        "machine": summary.machine,
        "text": {
            "name": summary.text.name,
            "sha256": summary.text.sha256,
            "train_bytes": len(summary.text.train),
            "held_out_bytes": len(summary.text.held_out),
            "unigram_loss": summary.unigram_loss,
        },
        "units": {"loss": "nats per byte", "seconds": "s", "bytes": "B"},
        "prompt": summary.prompt,
        "held_out_noise": noise(summary.runs),
        "runs": [_run(run, summary) for run in summary.runs],
        "verdicts": [vars(verdict) for verdict in summary.verdicts],
    }
    content = json.dumps(_finite(record), indent=1, allow_nan=False)
    write_atomically(path, f"{content}\n".encode())


def _run(run: RunResult, summary: Summary) -> dict[str, Any]:
    return {
        **run.as_dict(),
        "steps": run.steps,
        "last_loss": run.last_loss,
        "last_gradient_norm": run.last_gradient_norm,
        "held_out_loss": run.held_out_loss,
        "held_out_loss_relative_to_bf16": difference(run, summary.runs[0]),
        "median_step_seconds": run.median_step_seconds,
        "tokens_per_second": summary.tokens / run.median_step_seconds,
    }


def _finite(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
