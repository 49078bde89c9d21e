"""The options of `te-hal compare` as typer reads them: type and help of each, and what they make of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from te_hal.cli.config import DEFAULTS, CompareConfig, check_start, configure, default_text, split_names
from te_hal.cli.precision import DEFAULT_RECIPES, RECIPES
from te_hal.cli.threads import WORTH_SHARING

Model = Annotated[str, typer.Option(help=f"Kind of model: {', '.join(DEFAULTS)}.")]
Recipes = Annotated[
    list[str] | None,
    typer.Option(help=f"Of {', '.join(RECIPES)}; repeatable or with commas; default: {','.join(DEFAULT_RECIPES)}."),
]
Backend = Annotated[str | None, typer.Option(help='One of "te-hal backends"; default: the one in force.')]
Steps = Annotated[int | None, typer.Option(help=f"Steps of each run; {default_text('steps')}.")]
Width = Annotated[
    int | None, typer.Option(help=f"Features of hidden layers, a multiple of 16; {default_text('width')}.")
]
Layers = Annotated[int | None, typer.Option(help=f"Layers; {default_text('layers')}.")]
Heads = Annotated[int | None, typer.Option(help=f"Attention heads, which divide the width; {default_text('heads')}.")]
Experts = Annotated[
    int | None, typer.Option(help="Of each layer's mixture, in place of its MLP; default: none.", show_default=False)
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Experts that a byte goes to; default: 2.", show_default=False)
]
Sequence = Annotated[
    int | None, typer.Option(help=f"Bytes looked back on, of a gpt a multiple of 8; {default_text('sequence')}.")
]
Batch = Annotated[
    int | None, typer.Option(help=f"Sequences per step; of an mlp bytes, a multiple of 8; {default_text('batch')}.")
]
LearningRate = Annotated[float | None, typer.Option(help=f"Highest learning rate; {default_text('lr')}.")]
Seed = Annotated[int, typer.Option(help="Of weights and data order.")]
Fp32 = Annotated[bool, typer.Option("--fp32", help="Have a run in FP32 too.")]
Start = Annotated[
    str | None, typer.Option("--from", help='"bf16": after BF16, run each recipe in one layer before it runs in all.')
]
Sample = Annotated[int, typer.Option(help="Bytes that each trained model writes.")]
Data = Annotated[Path | None, typer.Option(help="Text file; default: Python's documentation topics.")]
Out = Annotated[Path, typer.Option(help="Folder for the JSON, PNG and checkpoint.")]
Threads = Annotated[
    int | None,
    typer.Option(help=f"Of torch on the CPU; default: 1 below width {WORTH_SHARING}, else as torch has it."),
]
TensorBoard = Annotated[Path | None, typer.Option(help="Folder to write the same to for TensorBoard.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")]
Shadow = Annotated[
    bool, typer.Option("--shadow", help="Have ops run on cpu_reference too; the first that differs goes into --out.")
]
ShadowSample = Annotated[float, typer.Option(help="With --shadow: share of the op calls.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints.")]
StopAfter = Annotated[int | None, typer.Option(help="Save and stop after so many steps of this call.")]

#: Options that are fields of a configuration under the same name.
_FIELDS = (
    *("model", "steps", "width", "layers", "heads", "experts", "top_k", "sequence", "batch", "lr", "seed", "fp32"),
    "sample",
)


def configuration(given: dict[str, Any]) -> CompareConfig:
    """The comparison that options ask for.

    Args:
        given: the arguments of the command, by name.

    Raises:
        ArgumentError: as CompareConfig.
    """
    recipes = None if given["recipe"] is None else split_names(given["recipe"])
    fields = {name: given[name] for name in _FIELDS}
    return configure(**fields, recipes=recipes, from_bf16=check_start(given["start"]))
