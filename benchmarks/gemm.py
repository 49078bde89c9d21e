"""FP8 gemm of cpu_reference, layout by layout, beside plain matrix products in bf16 and fp32.

    python benchmarks/gemm.py [--size 2048] [--rounds 9]

The FP8 gemm to a bf16 result decodes both operands to bf16 and multiplies there; "decode" is that part alone. To an
fp32 result it decodes to fp32 and multiplies in fp32, since torch's bf16 product has no fp32 result on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import environment_line
import torch

from te_hal import ops
from te_hal.backends.cpu_reference.decode import decode
from te_hal.schema.formats import E4M3, E5M2, ElementFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.storage import QuantizedStorage

#: The formats of both operands in HYBRID training.
OPERANDS = {"fprop": (E4M3, E4M3), "dgrad": (E5M2, E4M3), "wgrad": (E5M2, E4M3)}


def contestants(size: int) -> dict[str, Callable[[], object]]:
    """Name to the function that runs it once."""
    plain = torch.randn(size, size)
    rounded = plain.bfloat16()
    made: dict[str, Callable[[], object]] = {
        "mm fp32": lambda: torch.mm(plain, plain.t()),
        "mm bf16": lambda: torch.mm(rounded, rounded.t()),
    }
    for layout, formats in OPERANDS.items():
        a, b = (_quantized(rounded, each) for each in formats)
        made[f"FP8 {layout} to bf16"] = lambda a=a, b=b, layout=layout: ops.gemm(a, b, layout=layout)
        made["  of which decode" + " " * len(made)] = lambda a=a, b=b: (_decoded(a), _decoded(b))
    a = _quantized(rounded, E4M3)
    main_grad = torch.zeros(size, size)
    made["FP8 fprop to fp32"] = lambda: ops.gemm(a, a, out_dtype=torch.float32)
    made["FP8 wgrad into fp32 main_grad"] = lambda: ops.gemm(a, a, layout="wgrad", out=main_grad, accumulate=True)
    return made


def _quantized(values: torch.Tensor, format: ElementFormat) -> QuantizedStorage:
    return ops.quantize(values, torch.ones(1), dtype=format.dtype)


def _decoded(storage: QuantizedStorage) -> torch.Tensor:
    assert storage.rowwise_data is not None  # noqa: S101 - made above with a rowwise copy
    return decode(storage.rowwise_data, storage.format, torch.bfloat16)


def main() -> None:
    """Time all in turn, round by round, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    made = contestants(options.size)
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(options.rounds + 1):
        for name, run in made.items():
            start = time.perf_counter()
            run()
            if turn:  # the first is warm-up
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(environment_line.describe())
    print(f"{options.size}^3, median of {options.rounds}:")
    for name, median in medians.items():
        rate = "" if "decode" in name else f"{2e-9 * options.size**3 / median:8.0f} GFLOP/s"
        print(f"  {name.rstrip():30s} {1e3 * median:8.1f} ms {rate:16s} {median / medians['mm bf16']:6.2f} x bf16")


if __name__ == "__main__":
    main()
