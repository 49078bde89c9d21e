"""One training step (forward, backward) of Linear in FP8 beside nn.Linear in FP32 and BF16, in one run.

    python benchmarks/linear.py [--size 2048] [--rounds 9]

Two numbers first: a step is three gemms of 2*N^3 operations each; FP8 on the CPU decodes each operand twice and casts
three, and runs the gemms in bf16 (docs/numerics.md, G2), so its floor is the BF16 step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import environment_line
import torch

import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from collections.abc import Callable


def steps(size: int, device: str) -> dict[str, Callable[[], None]]:
    """The contestants, each a function that runs one step."""
    made: dict[str, Callable[[], None]] = {}
    for name, dtype in (("nn.Linear fp32", torch.float32), ("nn.Linear bf16", torch.bfloat16)):
        made[name] = _step(torch.nn.Linear(size, size, device=device, dtype=dtype), size, dtype, None)
    for name, chosen in (("delayed", recipe.DelayedScaling()), ("current", recipe.Float8CurrentScaling())):
        module = te.Linear(size, size, params_dtype=torch.bfloat16, device=device)
        made[f"te.Linear {name}"] = _step(module, size, torch.bfloat16, chosen)
    return made


def _step(module: torch.nn.Module, size: int, dtype: torch.dtype, chosen: recipe.Recipe | None) -> Callable[[], None]:
    device = next(module.parameters()).device
    x = torch.randn(size, size, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(size, size, dtype=dtype, device=device)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        y.backward(grad)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    """Time the contestants in turn, round by round, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    contestants = steps(options.size, options.device)
    for step in contestants.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, step in contestants.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(environment_line.describe(options.device))
    print(f"{options.size}^3, forward and backward, median of {options.rounds}:")
    for name, median in medians.items():
        fp32, bf16 = medians["nn.Linear fp32"], medians["nn.Linear bf16"]
        print(f"  {name:20s} {1e3 * median:8.1f} ms   {median / fp32:5.2f} x fp32   {median / bf16:5.2f} x bf16")


if __name__ == "__main__":
    main()
