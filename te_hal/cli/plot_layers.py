"""A row of compare.png for one FP8 run: amax and scale of each layer over time, and what the format cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from te_hal.cli.observed import losses_of_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

    from te_hal.cli.results import RunResult

_LINES = {"input": "-", "weight": ":", "grad_output": "--"}
#: Shares below this are drawn as this: 1 of 100,000 values.
_FLOOR = 1e-5
_MARGINS = {"left": 0.06, "right": 0.97, "top": 0.88, "bottom": 0.24, "wspace": 0.3}


def draw_layers(figure: SubFigure, run: RunResult) -> None:
    """Draw what te_hal.monitor has recorded of a run.

    Args:
        figure: a row to draw into.
        run: an FP8 run with observations.
    """
    figure.suptitle(f"{run.name}: amax, scale, and what FP8 cut off", fontsize="medium")
    amax, scale, names, lost = figure.subplots(1, 4, width_ratios=(1, 1, 0.35, 0.8), gridspec_kw=_MARGINS)
    names.set_axis_off()  # leaves the names of modules room
    tensors = [entry for entry in (run.observed or {})["tensors"] if entry["scale"][-1] is not None]
    modules = list(dict.fromkeys(entry["module"] for entry in tensors))
    _draw_series(amax, tensors, modules, "amax")
    _draw_series(scale, tensors, modules, "scale")
    amax.legend(
        [amax.plot([], [], color="black", linestyle=style)[0] for style in _LINES.values()],
        list(_LINES),
        fontsize="small",
    )
    _draw_lost(lost, run)


def _draw_series(axes: Axes, tensors: list[dict[str, Any]], modules: list[str], column: str) -> None:
    """A line per module and role, from dark (first module) to light (last)."""
    from matplotlib import colormaps  # noqa: PLC0415 - slow to import

    colors = colormaps["viridis"](np.linspace(0, 0.9, len(modules)))
    for entry in tensors:
        color = colors[modules.index(entry["module"])]
        axes.plot(entry["steps"], entry[column], _LINES.get(entry["role"], "-."), color=color, linewidth=0.9)
    axes.set(xlabel="step", ylabel=f"{column}; dark: first layers", yscale="log")
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _draw_lost(axes: Axes, run: RunResult) -> None:
    """A cell per module, role and kind of loss."""
    places = losses_of_format(run.observed)
    modules = list(dict.fromkeys(place.module for place in places))
    roles = list(dict.fromkeys(place.role for place in places))
    shares = np.full((len(modules), 2 * len(roles)), np.nan)
    for place in places:
        row, column = modules.index(place.module), 2 * roles.index(place.role)
        shares[row, column : column + 2] = place.clipped, place.flushed
    image = axes.imshow(
        np.log10(np.maximum(shares, _FLOOR)), aspect="auto", cmap="magma_r", vmin=np.log10(_FLOOR), vmax=0
    )
    headings = [f"{role} {kind}" for role in roles for kind in ("clip", "flush")]
    axes.set_xticks(range(len(headings)), headings, fontsize=7, rotation=90)
    axes.set_yticks(range(len(modules)), modules, fontsize=7)
    axes.figure.colorbar(image, ax=axes, label="log10 of the share of values")
