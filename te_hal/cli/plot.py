"""compare.png: the loss curves, and how far each run is from BF16."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from te_hal.cli.atomic import write_atomically
from te_hal.cli.verdict import TOLERANCE

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from te_hal.cli.results import RunResult
    from te_hal.cli.summary import Summary

# Okabe and Ito's colours, which stay apart in every kind of colour vision.
_COLORS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
_SMOOTHED_SHARE = 50


def write_plot(path: Path, summary: Summary) -> None:
    """Draw the comparison into a PNG.

    Raises:
        OSError: nothing was written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    baseline, *others = summary.runs
    window = max(1, baseline.steps_planned // _SMOOTHED_SHARE)
    _draw_losses(losses, summary, window)
    for run, color in zip(others, _COLORS[1:], strict=False):
        _draw_difference(differences, run, baseline, window, color)
    differences.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color="gray", alpha=0.15, linewidth=0)
    differences.axhline(0, color=_COLORS[0], linewidth=1)
    differences.set(xlabel="step", ylabel=f"loss above BF16's (%)\nband: \N{PLUS-MINUS SIGN}{TOLERANCE:.0%}")
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def _draw_losses(axes: Axes, summary: Summary, window: int) -> None:
    for run, color in zip(summary.runs, _COLORS, strict=False):
        label = run.name if run.finished else f"{run.name} ({run.steps} of {run.steps_planned} steps)"
        axes.plot(*_smooth(np.array(run.loss), window), color=color, label=label, linewidth=1.2)
        if run.held_out:
            axes.plot(*zip(*run.held_out, strict=True), "o", color=color, markersize=4)
    axes.axhline(summary.unigram_loss, color="gray", linestyle=":", label="byte frequencies alone")
    config, machine = summary.identity, summary.machine
    axes.set_title(
        f"te-hal compare: {config['model']}, width {config['width']}, {config['layers']} layers, "
        f"batch {config['batch']}, seed {config['seed']}\n{config['backend']} on {machine['device']}",
        fontsize="medium",
    )
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(title=f"lines: training, mean of {window} steps\ndots: held out")


def _draw_difference(axes: Axes, run: RunResult, baseline: RunResult, window: int, color: str) -> None:
    """Runs see the same batches, so their training losses can be compared step by step."""
    steps = min(run.steps, baseline.steps)
    where, loss = _smooth(np.array(run.loss[:steps]), window)
    _, reference = _smooth(np.array(baseline.loss[:steps]), window)
    axes.plot(where, 100 * (loss / reference - 1), color=color, linewidth=1.2)
    known = dict(baseline.held_out)
    points = [(step, 100 * (loss / known[step] - 1)) for step, loss in run.held_out if step in known]
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=color, markersize=4)


def _smooth(values: NDArray[np.float64], window: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps from 1 on, and the mean of up to `window` values that end with each."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    steps = np.arange(1, len(values) + 1)
    first = np.maximum(steps - window, 0)
    return steps, (sums[steps] - sums[first]) / (steps - first)
