"""Casting one tensor to FP8 with its own scale: te_hal's reference backend beside plain torch passes, in one run.

    python benchmarks/quantize.py [--rows 4096] [--columns 4096] [--rounds 15] [--chunk 17 18 19 20]

Goals at 4096x4096 bf16 on 2 threads: rowwise at most 0.6 x the time of whole-tensor passes, and at most 0.75 x the
input in extra memory, result included. Whole-tensor passes write and read an fp32 copy twice the size of the input;
pieces that stay in the cache do not. What limits the pieces is torch's conversion to E4M3, about half of their time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import environment_line
import torch

from te_hal import ops
from te_hal.backends.cpu_reference import chunks
from te_hal.schema.formats import E4M3

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.storage import QuantizedStorage

    Contestants = dict[str, Callable[[], object]]


def whole_tensor(x: torch.Tensor) -> torch.Tensor:
    """The composition to beat: each step over the whole tensor, in place where that is possible."""
    low, high = torch.aminmax(x)
    scale = E4M3.max / torch.maximum(-low, high).float()
    return x.float().mul_(scale).clamp_(-E4M3.max, E4M3.max).to(E4M3.dtype)


def whole_tensor_kept_buffers(x: torch.Tensor) -> Callable[[], object]:
    """The same with its fp32 copy and its result allocated beforehand: no page is touched for the first time."""
    values = torch.empty(x.shape, dtype=torch.float32)
    codes = torch.empty(x.shape, dtype=E4M3.dtype)

    def run() -> torch.Tensor:
        low, high = torch.aminmax(x)
        scale = E4M3.max / torch.maximum(-low, high).float()
        return codes.copy_(values.copy_(x).mul_(scale).clamp_(-E4M3.max, E4M3.max))

    return run


def quantize(x: torch.Tensor, out: QuantizedStorage | None = None, *, columnwise: bool = False) -> QuantizedStorage:
    """The same by ops: amax, scale, cast."""
    scale = ops.compute_scale(ops.amax(x), fp8_max=E4M3.max)
    return ops.quantize(x, scale, out=out, dtype=E4M3.dtype, columnwise=columnwise)


def contestants(x: torch.Tensor) -> Contestants:
    """What is timed, by name; the first is what the others are compared with."""
    filled, running, one = quantize(x), torch.zeros(1), torch.ones(1)
    return {
        "whole tensor": lambda: whole_tensor(x),
        "whole tensor, buffers kept": whole_tensor_kept_buffers(x),
        "rowwise": lambda: quantize(x),
        "rowwise, refilled": lambda: quantize(x, filled),
        "given scale, amax in the same pass": lambda: ops.quantize(x, one, amax=running, dtype=E4M3.dtype),
        "rowwise and transposed": lambda: quantize(x, columnwise=True),
        "dequantize": lambda: ops.dequantize(filled),
    }


def run_in_turn(timed: Contestants, rounds: int) -> dict[str, tuple[float, float]]:
    """Median and least milliseconds of each, all run once per round so that a disturbance meets them alike."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, run in timed.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def peak_growth(run: Callable[[], object]) -> int | None:
    """Bytes by which resident memory grew at its peak while ``run`` ran; None where Linux does not let us ask."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Print memory, then times and ratios, then times by size of the pieces."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, nargs="*", default=[], help="exponents of two: elements per piece")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(environment_line.describe())

    small = torch.randn(64, 64, dtype=torch.bfloat16)
    whole_tensor(small), quantize(small)
    x = torch.randn(options.rows, options.columns, dtype=torch.bfloat16)
    print(f"{options.rows}x{options.columns} bf16 to E4M3; extra memory at the peak, result included:")
    for name, run in (("whole tensor", lambda: whole_tensor(x)), ("rowwise", lambda: quantize(x))):
        grown = peak_growth(run)
        print(f"  {name:36s} {'unknown' if grown is None else f'{grown / (2 * x.numel()):5.2f} x input'}")

    timed = contestants(x)
    run_in_turn(timed, 2)
    results = run_in_turn(timed, options.rounds)
    whole_median, whole_least = results["whole tensor"]
    print(f"median and least of {options.rounds}, beside those of the whole-tensor passes:")
    for name, (median, least) in results.items():
        ratios = f"{median / whole_median:5.2f} x {least / whole_least:5.2f} x"
        print(f"  {name:36s} {median:7.2f} ms {least:7.2f} ms   {ratios}")
    for exponent in options.chunk:
        chunks.CHUNK = 1 << exponent
        median, least = run_in_turn({"rowwise": timed["rowwise"]}, options.rounds)["rowwise"]
        print(f"  rowwise, pieces of 2**{exponent:<14d} {median:7.2f} ms {least:7.2f} ms")


if __name__ == "__main__":
    main()
