"""What a call of a native kernel costs in Python, over a library whose kernels do nothing.

    python benchmarks/native_call.py [--rounds 61] [--calls 5000]

Goals: the native call with five tensors at most 1 us, quantize with the allocation of its output at most 3 us. Printed
are the least and the median of the rounds: other work on the machine adds to every round, some add little. Tensors are
small, so that no allocation asks the system for memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import environment_line
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import native_stub

from te_hal.ffi.binding import binding
from te_hal.ffi.devices import HOST
from te_hal.ffi.loader import open_library
from te_hal.ffi.marshalling import kernels
from te_hal.ffi.native import Native

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.ffi.devices import Devices

FP8 = torch.float8_e4m3fn


def empty_library(folder: Path, devices: Devices = HOST) -> Native:
    """A library whose kernels return at once."""
    native = Native("empty", "host", devices)
    native.library = open_library(native_stub.build(folder, QUIET=1))
    native.lib, native.ffi = binding()
    return native


def contestants(native: Native) -> dict[str, Callable[[], Any]]:
    """The bare call, and the kernels around it."""
    kernel = kernels(native)
    x, scale, amax = torch.randn(64, 128).to(torch.bfloat16), torch.ones(1), torch.zeros(1)
    weight = torch.ones(128, dtype=torch.bfloat16)
    quantize, call, api = kernel["quantize"], native.lib.api_quantize, native.library.api
    out = quantize(x, scale, dtype=FP8, columnwise=True)
    row, factor, col, _ = out.tensors()
    return {
        "nothing": lambda: None,
        "native call, 5 tensors": lambda: call(
            *(api, x.data_ptr(), 3, 64, 128, scale.data_ptr(), amax.data_ptr(), row.data_ptr(), col.data_ptr()),
            *(0, factor.data_ptr(), 0, 4, 0),
        ),
        "quantize, row, out given": lambda: quantize(x, scale, amax=amax, out=out, dtype=FP8, columnwise=True),
        "quantize, row": lambda: quantize(x, scale, amax=amax, dtype=FP8),
        "quantize, row + col": lambda: quantize(x, scale, amax=amax, dtype=FP8, columnwise=True),
        "quantize_current, row": lambda: kernel["quantize_current"](x, dtype=FP8),
        "bias_grad_quantize, row": lambda: kernel["bias_grad_quantize"](x, scale, amax=amax, dtype=FP8),
        "dequantize": lambda: kernel["dequantize"](out),
        "amax": lambda: kernel["amax"](x),
        "compute_scale": lambda: kernel["compute_scale"](amax, fp8_max=448.0),
        "gemm, quantized operands": lambda: kernel["gemm"](out, out),
        "rmsnorm_fwd": lambda: kernel["rmsnorm_fwd"](x, weight),
        "for scale: torch.empty": lambda: torch.empty((64, 128), dtype=torch.uint8, device=x.device),
        "for scale: scale.add_(1)": lambda: scale.add_(1),
    }


def measure(function: Callable[[], Any], rounds: int, calls: int) -> tuple[float, float]:
    """Least and median microseconds of one call."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return min(times), statistics.median(times)


def main() -> None:
    """Print one line per contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--calls", type=int, default=5000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(environment_line.describe())
    with tempfile.TemporaryDirectory() as folder:
        for name, function in contestants(empty_library(Path(folder))).items():
            least, median = measure(function, options.rounds, options.calls)
            print(f"{name:28s} {least:6.2f} us   median {median:6.2f}")


if __name__ == "__main__":
    main()
