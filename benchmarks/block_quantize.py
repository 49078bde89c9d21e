"""Casting with a scale per block beside casting with one per tensor, both copies, on the reference backend, in one run.

    python benchmarks/block_quantize.py [--rows 4096] [--columns 4096] [--rounds 15] [--threads 2] [--cpu-time]

Goal at 4096x4096 bf16, rowwise and columnwise: 1x128, 128x128 and MXFP8 at most 4 x the time of one scale per tensor,
NVFP4 with Hadamard's transform at most 12 x.
Blocks along rows and along columns give two sets of codes, so that torch's conversion to E4M3, which is most of the
time of either, runs twice; square blocks give one. Torch has no conversion to NVFP4's codes:
a dozen passes round them. On cores that other work shares, compare the process's own time: ``--threads 1 --cpu-time``.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from typing import TYPE_CHECKING

import environment_line
import torch

from te_hal import ops
from te_hal.schema.formats import E2M1, E4M3

if TYPE_CHECKING:
    from collections.abc import Callable

    Contestants = dict[str, Callable[[], object]]

_GOAL, _GOAL_NVFP4 = 4.0, 12.0
_BASE = "per tensor, given scale"


def contestants(x: torch.Tensor) -> Contestants:
    """What is timed, by name; the first is what the others are compared with."""
    cast = functools.partial(ops.quantize, x, dtype=E4M3.dtype, columnwise=True)
    one = torch.ones(1)
    nvfp4 = functools.partial(ops.quantize, x, dtype=E2M1.dtype, columnwise=True)
    filled = cast(mode="block_1x128")
    return {
        _BASE: functools.partial(cast, one),
        "per tensor, its own amax": lambda: cast(ops.compute_scale(ops.amax(x), fp8_max=E4M3.max)),
        "1x128": functools.partial(cast, mode="block_1x128"),
        "1x128, powers of 2": functools.partial(cast, mode="block_1x128", power_of_2=True),
        "1x128, refilled": functools.partial(cast, mode="block_1x128", out=filled),
        "128x128": functools.partial(cast, mode="block_128x128"),
        "MXFP8, transposed": functools.partial(cast, mode="mxfp8"),
        "MXFP8, same order": functools.partial(cast, mode="mxfp8", columnwise_order="same"),
        "NVFP4": functools.partial(nvfp4, mode="nvfp4"),
        "NVFP4, Hadamard": functools.partial(nvfp4, mode="nvfp4_hadamard"),
        "NVFP4, 16x16": functools.partial(nvfp4, mode="nvfp4_16x16"),
        "NVFP4, Hadamard, by chance": functools.partial(nvfp4, mode="nvfp4_hadamard", rounding_seed=1),
        "1x128, dequantize": lambda: ops.dequantize(filled),
    }


def run_in_turn(
    timed: Contestants, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, tuple[float, float]]:
    """Median and least milliseconds of each, all run once per round so that a disturbance meets them alike."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, run in timed.items():
            start = clock()
            run()
            times[name].append(1e3 * (clock() - start))
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def main() -> None:
    """Print times, and ratios to the cast with one scale per tensor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="of the process, all threads, in place of the wall's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(environment_line.describe())

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.rows, options.columns, generator=generator).bfloat16()
    timed = contestants(x)
    run_in_turn(timed, 2)
    results = run_in_turn(timed, options.rounds, time.process_time if options.cpu_time else time.perf_counter)
    median_base, least_base = results[_BASE]
    print(f"{options.rows}x{options.columns} bf16, both copies; median and least of {options.rounds},")
    print(f"beside one scale per tensor (goals: at most {_GOAL:g} x, NVFP4 with Hadamard {_GOAL_NVFP4:g} x):")
    for name, (median, least) in results.items():
        ratios = f"{median / median_base:5.2f} x {least / least_base:5.2f} x"
        print(f"  {name:26s} {median:8.2f} ms {least:8.2f} ms   {ratios}")


if __name__ == "__main__":
    main()
