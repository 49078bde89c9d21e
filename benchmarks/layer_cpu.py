"""TransformerLayer on the CPU beside the same computation in plain torch modules and SDPA, in one run.

    python benchmarks/layer_cpu.py [--rounds 7] [--threads 2] [--cpu-time] [--only NAME ...] [--profile NAME]

Hidden 1024, 16 heads, sequence 512, batch 4, forward and backward. Goals: without FP8 at most 1.10 x plain torch in the
same dtype; FP8 with a scale per tensor at most 1.5 x FP32 of te_hal, with a scale per block, or MXFP8, 2 x. Contestants
take turns; beside the median stands the least time, as other work on the machine only ever adds. Where cores are
shared, one thread and `--cpu-time` count what the process itself used. `--profile` prints where a contestant's time
goes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import environment_line
import torch
from gpt_step import run_in_turn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt_model import PlainLayer, Sizes

import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = Sizes(width=1024, heads=16, layers=1, feed_forward=4096, sequence=512, batch=4)


class Contestant(NamedTuple):
    """What runs, and what it is held against.

    Attributes:
        dtype: of activations and parameters.
        chosen: recipe; None without FP8.
        plain: in plain torch.
        goals: the most that it may take of another's time, by its name.
    """

    dtype: torch.dtype
    chosen: Callable[[], recipe.Recipe] | None = None
    plain: bool = False
    goals: tuple[tuple[str, float], ...] = ()


FP32, BF16 = torch.float32, torch.bfloat16
PER_TENSOR, PER_BLOCK = (("te_hal fp32", 1.5),), (("te_hal fp32", 2.0),)
CONTESTANTS = {
    "torch fp32": Contestant(FP32, plain=True),
    "torch bf16": Contestant(BF16, plain=True),
    "te_hal fp32": Contestant(FP32, goals=(("torch fp32", 1.10),)),
    "te_hal bf16": Contestant(BF16, goals=(("torch bf16", 1.10),)),
    "delayed": Contestant(BF16, recipe.DelayedScaling, goals=PER_TENSOR),
    "current": Contestant(BF16, recipe.Float8CurrentScaling, goals=PER_TENSOR),
    "block": Contestant(BF16, recipe.Float8BlockScaling, goals=PER_BLOCK),
    "mxfp8": Contestant(BF16, recipe.MXFP8BlockScaling, goals=PER_BLOCK),
}


def one_step(of: Contestant, sizes: Sizes = SIZES) -> Callable[[], torch.Tensor]:
    """A function that runs forward and backward of a layer of its own; the values are the same for all."""
    torch.manual_seed(0)
    layer: torch.nn.Module = te.TransformerLayer(
        sizes.width,
        sizes.feed_forward,
        sizes.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=of.dtype,
    )
    if of.plain:
        layer = PlainLayer(layer, sizes)
    torch.manual_seed(1)
    x = torch.randn(sizes.sequence, sizes.batch, sizes.width).to(of.dtype).requires_grad_()
    grad, chosen = torch.randn_like(x), None if of.chosen is None else of.chosen()

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(x)
        y.backward(grad)
        return y.detach()

    return step


def print_profile(step: Callable[[], torch.Tensor]) -> None:
    """Where the time of a step goes, operator by operator."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def main() -> None:
    """Print times, ratios and goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="of the process instead of the clock's")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="some contestants")
    parser.add_argument("--profile", choices=CONTESTANTS, help="one contestant, operator by operator")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(environment_line.describe())
    print(SIZES)
    if options.profile is not None:
        print_profile(one_step(CONTESTANTS[options.profile]))
        return
    names = options.only or list(CONTESTANTS)
    clock = time.process_time if options.cpu_time else time.perf_counter
    found = run_in_turn({name: one_step(CONTESTANTS[name]) for name in names}, options.rounds, clock)
    for name, times in found.items():
        beside = [
            f"{times.median / found[other].median:.2f} x {other} (least: {times.least / found[other].least:.2f}; "
            f"goal {goal:.2f}{'' if times.least <= goal * found[other].least else ': missed'})"
            for other, goal in CONTESTANTS[name].goals
            if other in found
        ]
        print(f"{name:12s} {times.median:8.1f} ms, least {times.least:8.1f}   {'; '.join(beside)}")


if __name__ == "__main__":
    main()
