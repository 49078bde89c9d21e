"""A GPT's training step through te_hal beside the same model in plain torch, on the CPU, in one run.

    python benchmarks/gpt_step.py [--rounds 7] [--threads 2] [--cpu-time]

Width 384, 6 heads, 4 layers, sequence 256, batch 8. A step is forward, loss and backward, no optimizer; the model is
that of examples/gpt_model.py, the values the same for all. Goals: FP8 at most 1.3 x FP32 and 2.5 x BF16 of plain torch;
without FP8 at most 1.10 x plain torch in the same dtype. The contestants take turns, and beside the median stands the
least time: other work on the machine only ever adds. Where cores are shared, one thread and `--cpu-time` count what the
process itself used: several threads wait for each other after every operation, the longer the more others run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import environment_line
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt_model import VOCABULARY, Gpt, Sizes

import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = Sizes(width=384, heads=6, layers=4, feed_forward=1536, sequence=256, batch=8)
#: Contestant to what it is held against, and the most it may take of its time.
GOALS = {
    "te_hal fp32": {"torch fp32": 1.10},
    "te_hal bf16": {"torch bf16": 1.10},
    "te_hal delayed": {"torch fp32": 1.3, "torch bf16": 2.5},
    "te_hal current": {"torch fp32": 1.3, "torch bf16": 2.5},
}


class Times(NamedTuple):
    """Milliseconds of a step."""

    median: float
    least: float


def contestants(sizes: Sizes) -> dict[str, Callable[[], None]]:
    """One step of each, by name."""
    delayed, current = recipe.DelayedScaling(amax_history_len=16), recipe.Float8CurrentScaling()
    return {
        "torch fp32": one_step(sizes, torch.float32, plain=True),
        "torch bf16": one_step(sizes, torch.bfloat16, plain=True),
        "te_hal fp32": one_step(sizes, torch.float32),
        "te_hal bf16": one_step(sizes, torch.bfloat16),
        "te_hal delayed": one_step(sizes, torch.bfloat16, delayed),
        "te_hal current": one_step(sizes, torch.bfloat16, current),
    }


def one_step(
    sizes: Sizes, dtype: torch.dtype, chosen: recipe.Recipe | None = None, *, plain: bool = False
) -> Callable[[], None]:
    """A function that runs forward, loss and backward of a model of its own."""
    torch.manual_seed(0)
    model = Gpt(sizes, plain=plain, dtype=dtype)
    tokens = torch.randint(VOCABULARY, (sizes.batch, sizes.sequence + 1), device=model.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return step


def run_in_turn(
    steps: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Times]:
    """Every contestant once per round, after a first round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name, step in steps.items():
            start = clock()
            step()
            if index:
                times[name].append(1e3 * (clock() - start))
    return {name: Times(statistics.median(values), min(values)) for name, values in times.items()}


def main() -> None:
    """Print times, ratios and goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="of the process instead of the clock's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(environment_line.describe())
    print(SIZES)
    clock = time.process_time if options.cpu_time else time.perf_counter
    found = run_in_turn(contestants(SIZES), options.rounds, clock)
    for name, times in found.items():
        beside = [
            f"{times.median / found[other].median:.2f} x {other} (least: {times.least / found[other].least:.2f}; "
            f"goal {goal:.2f})"
            for other, goal in GOALS.get(name, {}).items()
        ]
        print(f"{name:15s} {times.median:8.1f} ms, least {times.least:8.1f}   {'; '.join(beside)}")


if __name__ == "__main__":
    main()
