"""`te-hal compare`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from te_hal.cli.config import CompareConfig, check_count, split_names
from te_hal.cli.failure import wrong_input_ends
from te_hal.cli.precision import RECIPES
from te_hal.cli.session import Session

_DEFAULTS = CompareConfig()


def compare(
    model: Annotated[str, typer.Option(help="Kind of model.")] = _DEFAULTS.model,
    recipe: Annotated[
        list[str] | None, typer.Option(help=f"FP8 recipes, repeatable or with commas; default: {','.join(RECIPES)}.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help='One of "te-hal backends"; default: the one in force.')] = None,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = _DEFAULTS.steps,
    width: Annotated[int, typer.Option(help="Features of hidden layers, a multiple of 16.")] = _DEFAULTS.width,
    layers: Annotated[int, typer.Option(help="Residual blocks.")] = _DEFAULTS.layers,
    batch: Annotated[int, typer.Option(help="Predictions per step, a multiple of 8.")] = _DEFAULTS.batch,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = _DEFAULTS.lr,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = _DEFAULTS.seed,
    data: Annotated[Path | None, typer.Option(help="Text file; default: Python's documentation topics.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON, PNG and checkpoint.")] = Path("out/compare"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    stop_after: Annotated[int | None, typer.Option(help="Save and stop after so many steps of this call.")] = None,
) -> None:
    """Train a byte-level model in BF16, FP32 and FP8 from the same start on the same data, and compare.

    Ctrl-C ends it after the step under way, with a checkpoint and a report of what is known.
    """
    with wrong_input_ends():
        recipes = _DEFAULTS.recipes if recipe is None else split_names(recipe)
        config = CompareConfig(model, recipes, steps, width, layers, batch, seed, lr)
        check_count("--checkpoint-every", checkpoint_every)
        check_count("--stop-after", 1 if stop_after is None else stop_after)
        session = Session(config, backend=backend, data=data, out=out, resume=resume)
    raise typer.Exit(session.run(save_every=checkpoint_every, stop_after=stop_after))
