"""What te_hal.shadow costs: a layer's training with and without it, in turns.

    python benchmarks/shadow.py [--sample 0.01] [--width 512] [--steps 100]

Goal: at a sampling rate of 1/100 at most 10% on top of the training. Time is that of the process, so that other work on
shared cores counts little; one thread. The backend is cpu_reference, its reference too.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import environment_line
import torch

import te_hal
import te_hal.modules as te
from te_hal import recipe


def seconds(layer: te.TransformerLayer, x: torch.Tensor, steps: int, shadow: te_hal.shadowing.Shadow | None) -> float:
    """Time of the process for some training steps."""
    began = time.process_time()
    for _ in range(steps):
        with te.autocast(recipe=recipe.DelayedScaling()):
            y = layer(x)
        y.float().square().mean().backward()
        layer.zero_grad()
        if shadow is not None:
            shadow.step()
    return time.process_time() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100, help="of a turn; a block makes every plan anew")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    width = options.width
    kept = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    layers = [te.TransformerLayer(width, 4 * width, 8, **kept) for _ in range(2)]
    x = torch.randn(width, 1, width).bfloat16()
    totals, compared = [0.0, 0.0], 0
    for turn in range(-1, options.turns):
        for index, layer in enumerate(layers):
            block = te_hal.shadow(sample=options.sample, seed=turn) if index else contextlib.nullcontext()
            with block as shadow:
                took = seconds(layer, x, options.steps if turn >= 0 else 3, shadow)
            if turn >= 0:
                totals[index] += took
                compared += shadow.cost.compared if shadow else 0
    steps = options.steps * options.turns
    of = f"width {width}, {width} tokens, {steps} steps each, {options.turns} turns"
    print(environment_line.describe())
    print(f"TransformerLayer, bf16, DelayedScaling, {of}")
    print(f"  without        {totals[0] / steps * 1e3:8.2f} ms a step")
    print(f"  sample={options.sample:<8g}{totals[1] / steps * 1e3:8.2f} ms a step, {compared} calls compared")
    print(f"  cost (goal: 10% at 0.01) {totals[1] / totals[0] - 1:.1%}")


if __name__ == "__main__":
    main()
