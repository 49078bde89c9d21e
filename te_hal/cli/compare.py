"""`te-hal compare`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from te_hal.cli.config import DEFAULTS, MODELS, check_count, check_start, configure, default_text, split_names
from te_hal.cli.failure import wrong_input_ends
from te_hal.cli.precision import DEFAULT_RECIPES, RECIPES
from te_hal.cli.session import Session
from te_hal.cli.tensorboard import open_tensorboard


def compare(
    model: Annotated[str, typer.Option(help=f"Kind of model: {', '.join(DEFAULTS)}.")] = MODELS[0],
    recipe: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(RECIPES)}; repeatable or with commas; default: {','.join(DEFAULT_RECIPES)}."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help='One of "te-hal backends"; default: the one in force.')] = None,
    steps: Annotated[int | None, typer.Option(help=f"Steps of each run; {default_text('steps')}.")] = None,
    width: Annotated[
        int | None, typer.Option(help=f"Features of hidden layers, a multiple of 16; {default_text('width')}.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help=f"Layers; {default_text('layers')}.")] = None,
    heads: Annotated[
        int | None, typer.Option(help=f"Attention heads, which divide the width; {default_text('heads')}.")
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(help=f"Bytes looked back on, for a gpt a multiple of 8; {default_text('sequence')}."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help=f"Sequences per step; of an mlp bytes, a multiple of 8; {default_text('batch')}."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help=f"Highest learning rate; {default_text('lr')}.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0,
    fp32: Annotated[bool, typer.Option("--fp32", help="Have a run in FP32 too.")] = False,
    start: Annotated[
        str | None,
        typer.Option("--from", help='"bf16": after BF16, run each recipe in one layer before it runs in all.'),
    ] = None,
    sample: Annotated[int, typer.Option(help="Bytes that each trained model writes.")] = 120,
    data: Annotated[Path | None, typer.Option(help="Text file; default: Python's documentation topics.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON, PNG and checkpoint.")] = Path("out/compare"),
    tensorboard: Annotated[Path | None, typer.Option(help="Folder to write the same to for TensorBoard.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    stop_after: Annotated[int | None, typer.Option(help="Save and stop after so many steps of this call.")] = None,
) -> None:
    """Train a byte-level model in BF16 and in FP8 from the same start on the same data, and compare.

    Ctrl-C ends it after the step under way, with a checkpoint and a report of what is known.
    """
    with wrong_input_ends():
        config = configure(
            model,
            recipes=None if recipe is None else split_names(recipe),
            steps=steps,
            width=width,
            layers=layers,
            heads=heads,
            sequence=sequence,
            batch=batch,
            lr=lr,
            seed=seed,
            fp32=fp32,
            sample=sample,
            from_bf16=check_start(start),
        )
        check_count("--checkpoint-every", checkpoint_every)
        check_count("--stop-after", 1 if stop_after is None else stop_after)
        board = None if tensorboard is None else open_tensorboard(tensorboard)
        session = Session(config, backend=backend, data=data, out=out, resume=resume, board=board)
    raise typer.Exit(session.run(save_every=checkpoint_every, stop_after=stop_after))
