"""Experts on the CPU: the way of rows there and back beside plain torch, and GroupedLinear beside a loop of nn.Linear.

    python benchmarks/moe.py [--rounds 7] [--threads 2] [--cpu-time]

4096 tokens of 512 features, 8 experts, 2 for each token. Goals: each way at most 1.5 x torch's own gather of the same
rows (there) or of its sum of gathered rows (back), forward and backward, and 1/10 of a loop over tokens; GroupedLinear
at most 1.10 x a loop of nn.Linear in the same dtype. Contestants take turns; gpt_step.py says what the times mean.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import environment_line
import torch
from gpt_step import run_in_turn

import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS, HIDDEN, EXPERTS, TOP_K = 4096, 512, 8, 2
#: Contestant to what it is held against, and the most it may take of its time.
GOALS = {
    "moe_permute": {"torch gather": 1.5, "loop over tokens": 0.1},
    "moe_unpermute": {"torch gather and sum": 1.5},
    "GroupedLinear fp32": {"nn.Linear fp32": 1.10},
    "GroupedLinear bf16": {"nn.Linear bf16": 1.10},
    "GroupedLinear delayed": {"nn.Linear fp32": 1.3, "nn.Linear bf16": 2.5},
    "GroupedLinear current": {"nn.Linear fp32": 1.3, "nn.Linear bf16": 2.5},
}


def contestants() -> dict[str, Callable[[], None]]:
    """One forward and backward of each, by name."""
    torch.manual_seed(0)
    chosen = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, value=True)
    return {**_ways(mask), **_products([size // 16 * 16 for size in mask.sum(0).tolist()])}


def _ways(mask: torch.Tensor) -> dict[str, Callable[[], None]]:
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, requires_grad=True)
    by_expert = mask.t().nonzero()
    token, expert = by_expert[:, 1], by_expert[:, 0]
    rows, row_id_map = te.moe_permute(x.detach(), mask)
    rows.requires_grad_()
    gradient, back = torch.randn_like(rows), torch.randn_like(x)

    def merged() -> torch.Tensor:
        weighted = rows.float() * probs[token, expert][:, None]
        return torch.zeros(TOKENS, HIDDEN).index_add(0, token, weighted).bfloat16()

    def one_by_one() -> torch.Tensor:
        return torch.stack([x[number] for number in token.tolist()])

    return {
        "torch gather": lambda: x[token].backward(gradient),
        "loop over tokens": lambda: one_by_one().backward(gradient),
        "moe_permute": lambda: te.moe_permute(x, mask)[0].backward(gradient),
        "torch gather and sum": lambda: merged().backward(back),
        "moe_unpermute": lambda: te.moe_unpermute(rows, row_id_map, probs).backward(back),
    }


def _products(splits: list[int]) -> dict[str, Callable[[], None]]:
    steps: dict[str, Callable[[], None]] = {}
    for dtype, short in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        steps[f"nn.Linear {short}"] = _loop(splits, dtype)
        steps[f"GroupedLinear {short}"] = _grouped(splits, dtype)
    steps["GroupedLinear delayed"] = _grouped(splits, torch.bfloat16, recipe.DelayedScaling(amax_history_len=16))
    steps["GroupedLinear current"] = _grouped(splits, torch.bfloat16, recipe.Float8CurrentScaling())
    return steps


def _loop(splits: list[int], dtype: torch.dtype) -> Callable[[], None]:
    layers = [torch.nn.Linear(HIDDEN, 4 * HIDDEN, dtype=dtype) for _ in splits]
    x = torch.randn(sum(splits), HIDDEN, dtype=dtype, requires_grad=True)
    gradient = torch.randn(sum(splits), 4 * HIDDEN, dtype=dtype)

    def step() -> None:
        for layer in layers:
            layer.zero_grad()
        x.grad = None
        torch.cat([layer(part) for layer, part in zip(layers, x.split(splits), strict=True)]).backward(gradient)

    return step


def _grouped(splits: list[int], dtype: torch.dtype, chosen: recipe.Recipe | None = None) -> Callable[[], None]:
    layer = te.GroupedLinear(len(splits), HIDDEN, 4 * HIDDEN, params_dtype=dtype)
    x = torch.randn(sum(splits), HIDDEN, dtype=dtype, requires_grad=True)
    gradient = torch.randn(sum(splits), 4 * HIDDEN, dtype=dtype)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(x, splits)
        y.backward(gradient)

    return step


def main() -> None:
    """Print times, ratios and goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="of the process instead of the clock's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(environment_line.describe())
    print(f"{TOKENS} tokens of {HIDDEN}, {EXPERTS} experts, {TOP_K} for each token")
    found = run_in_turn(contestants(), options.rounds, time.process_time if options.cpu_time else time.perf_counter)
    for name, times in found.items():
        beside = [
            f"{times.median / found[other].median:.2f} x {other} (goal {goal})"
            for other, goal in GOALS.get(name, {}).items()
        ]
        print(f"{name:22s} {times.median:8.1f} ms, least {times.least:8.1f}   {'; '.join(beside)}")


if __name__ == "__main__":
    main()
