"""compare.png: the loss curves, how far each run is from BF16, and what FP8 did to each layer."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from te_hal.cli.atomic import write_atomically
from te_hal.cli.failure import WRONG_INPUT, fail
from te_hal.cli.observed import losses_of_format
from te_hal.cli.plot_layers import draw_layers
from te_hal.cli.precision import BASELINE, SECOND_SEED
from te_hal.cli.verdict import TOLERANCE

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from te_hal.cli.results import RunResult
    from te_hal.cli.summary import Summary

# Okabe and Ito's colours, which stay apart in every kind of colour vision.
_COLORS = ("#000000", "#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_SMOOTHED_SHARE = 50
#: Inches.
_WIDTH, _TOP, _ROW = 13, 9, 4.5
#: Room around the panels, given, because a layout that is found out takes a second drawing.
_MARGINS = {"left": 0.07, "right": 0.98, "top": 0.93, "bottom": 0.08, "wspace": 0.22, "hspace": 0.28}


def load_matplotlib() -> None:
    """Import what a plot needs, before there is anything to lose: it takes a second, and may fail.

    Raises:
        typer.Exit: after a message, where it cannot be imported.
    """
    try:
        import matplotlib.backends.backend_agg  # noqa: PLC0415 - slow; other commands draw nothing
        import matplotlib.figure  # noqa: F401, PLC0415 - the same
    except ImportError as error:
        fail(f"te-hal compare: the plot needs matplotlib ({error}): pip install 'te-hal[cli]'", WRONG_INPUT)


def write_plot(path: Path, summary: Summary) -> None:
    """Draw the comparison into a PNG.

    Raises:
        OSError: nothing was written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    observed = [run for run in summary.runs if run.recipe is not None and losses_of_format(run.observed)]
    figure = Figure(figsize=(_WIDTH, _TOP + _ROW * len(observed)))
    rows = figure.subfigures(1 + len(observed), 1, height_ratios=(_TOP, *[_ROW] * len(observed)), squeeze=False)
    axes = rows[0, 0].subplots(2, 2, gridspec_kw=_MARGINS)
    window = max(1, summary.runs[0].steps_planned // _SMOOTHED_SHARE)
    _draw_losses(axes[0, 0], summary, window)
    _draw_gradient_norms(axes[0, 1], summary, window)
    _draw_differences(axes[1, 0], summary, window)
    _draw_speed(axes[1, 1], summary)
    for run, row in zip(observed, rows[1:, 0], strict=True):
        draw_layers(row, run)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
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
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend(title=f"lines: training, mean of {window} steps\ndots: held out", fontsize="small")
    axes.grid(alpha=0.3)


def _draw_gradient_norms(axes: Axes, summary: Summary, window: int) -> None:
    for run, color in zip(summary.runs, _COLORS, strict=False):
        axes.plot(*_smooth(np.array(run.gradient_norm), window), color=color, linewidth=1.2)
    axes.set(xlabel="step", ylabel="gradient norm before clipping")
    axes.grid(alpha=0.3)


def _draw_differences(axes: Axes, summary: Summary, window: int) -> None:
    """All runs but the one of another seed see the same batches; that one's distance is drawn as a band."""
    baseline = summary.runs[0]
    for run, color in zip(summary.runs[1:], _COLORS[1:], strict=False):
        where, above = _difference(run, baseline, window)
        if run.name == SECOND_SEED:
            # Two seeds see other batches, so how far they are apart at one step says little; the band is their
            # distance around each step.
            band = _smooth(np.abs(above), 5 * window)[1]
            axes.fill_between(where, -band, band, color=color, alpha=0.3, linewidth=0, label="two BF16 seeds")
            continue
        axes.plot(where, above, color=color, linewidth=1.2, label=run.name)
        known = dict(baseline.held_out)
        points = [(step, 100 * (loss / known[step] - 1)) for step, loss in run.held_out if step in known]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=color, markersize=4)
    for limit in (-TOLERANCE, TOLERANCE):
        axes.axhline(100 * limit, color="gray", linewidth=1, linestyle=":")
    axes.axhline(0, color=_COLORS[0], linewidth=1)
    axes.set(xlabel="step", ylabel=f"loss above {BASELINE}'s (%)\ndotted: \N{PLUS-MINUS SIGN}{TOLERANCE:.0%}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _difference(run: RunResult, baseline: RunResult, window: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps, and by how many percent the smoothed training loss is above the baseline's."""
    steps = min(run.steps, baseline.steps)
    where, loss = _smooth(np.array(run.loss[:steps]), window)
    _, reference = _smooth(np.array(baseline.loss[:steps]), window)
    return where, 100 * (loss / reference - 1)


def _draw_speed(axes: Axes, summary: Summary) -> None:
    runs = [run for run in summary.runs if run.steps]
    speeds = [summary.tokens / run.median_step_seconds for run in runs]
    bars = axes.barh([run.name for run in runs], speeds, color=_COLORS[: len(runs)])
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second (median)")


def _smooth(values: NDArray[np.float64], window: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps from 1 on, and the mean of up to `window` values that end with each."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    steps = np.arange(1, len(values) + 1)
    first = np.maximum(steps - window, 0)
    return steps, (sums[steps] - sums[first]) / (steps - first)
