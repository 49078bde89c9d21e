"""`te-hal compare`: the command."""

from __future__ import annotations

from pathlib import Path

import typer

import te_hal
from te_hal.cli import compare_options as option
from te_hal.cli.config import MODELS, check_count
from te_hal.cli.failure import wrong_input_ends
from te_hal.cli.interrupt import ending_at_once
from te_hal.cli.session import Session
from te_hal.cli.tensorboard import open_tensorboard
from te_hal.cli.threads import MOST_THREADS, torch_threads


def compare(
    model: option.Model = MODELS[0],
    recipe: option.Recipes = None,
    backend: option.Backend = None,
    steps: option.Steps = None,
    width: option.Width = None,
    layers: option.Layers = None,
    heads: option.Heads = None,
    experts: option.Experts = None,
    top_k: option.TopK = None,
    sequence: option.Sequence = None,
    batch: option.Batch = None,
    lr: option.LearningRate = None,
    seed: option.Seed = 0,
    fp32: option.Fp32 = False,
    start: option.Start = None,
    sample: option.Sample = 120,
    data: option.Data = None,
    out: option.Out = Path("out/compare"),
    threads: option.Threads = None,
    tensorboard: option.TensorBoard = None,
    resume: option.Resume = False,
    checkpoint_every: option.CheckpointEvery = 100,
    stop_after: option.StopAfter = None,
    shadow: option.Shadow = False,
    shadow_sample: option.ShadowSample = 1.0,
) -> None:
    """Train a byte-level model in BF16 and in FP8 from the same start on the same data, and compare.

    Ctrl-C ends it after the step under way, with a checkpoint and a report of what is known.
    """
    given = dict(locals())
    with ending_at_once():
        with wrong_input_ends():
            config = option.configuration(given)
            check_count("--checkpoint-every", checkpoint_every)
            check_count("--stop-after", 1 if stop_after is None else stop_after)
            check_count("--threads", 1 if threads is None else threads, most=MOST_THREADS)
            board = None if tensorboard is None else open_tensorboard(tensorboard)
            beside = te_hal.shadow(sample=shadow_sample, folder=out) if shadow else None
        with torch_threads(threads, config.width):
            with wrong_input_ends():
                session = Session(
                    config, backend=backend, data=data, out=out, resume=resume, board=board, shadow=beside
                )
            raise typer.Exit(session.run(save_every=checkpoint_every, stop_after=stop_after))
