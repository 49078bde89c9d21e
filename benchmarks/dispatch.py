"""What an op call costs over calling the backend's function directly, on the null backend.

    python benchmarks/dispatch.py [--rounds 41] [--calls 20000]

Goals: finding the kernel at most 0.5 us on a memo hit, the whole call with checks at most 2 us more than the direct
call, for two operands. The direct call passes every argument, as a caller without te_hal would have to. ``out`` is
given, so that the null kernel returns at once and its own time does not drown the difference; that makes three
operands, one more than the goals speak of.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import environment_line
import torch

import te_hal
from te_hal import ops
from te_hal.dispatch import current_memo, entry
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.checks import entry_source
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.op import OpSchema

A = torch.ones(16, 32, dtype=torch.bfloat16)
B = torch.ones(8, 32, dtype=torch.bfloat16)
OUT = torch.empty(16, 8, dtype=torch.bfloat16)


def microseconds(functions: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, float]:
    """Median time of one call of each function, the functions taking turns; an empty call is subtracted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - begin) / calls * 1e6)
    medians = {name: statistics.median(values) for name, values in times.items()}
    empty = medians.pop("empty")
    return {name: median - empty for name, median in medians.items()}


def look_up(schema: OpSchema) -> Callable[..., Any]:
    """The op's generated entry, cut off where its checks begin: the kernel of a call that the memo knows."""
    lines = entry_source(schema).splitlines()
    checks = next(number for number, line in enumerate(lines) if "on_miss(SCHEMA, key" in line) + 1
    source = "\n".join([*lines[:checks], "    return kernel"])
    namespace: dict[str, Any] = {"S": QuantizedStorage, "SCHEMA": schema, "current_memo": current_memo}
    exec(source, namespace)  # noqa: S102 - the text is te_hal's own
    return namespace[f"enter_{schema.name}"]  # type: ignore[no-any-return] # a namespace holds anything


def contestants() -> dict[str, Callable[[], Any]]:
    """The direct call, the op, and the parts of the op."""
    kernel = te_hal.get_backend().kernels["gemm"]
    enter, find = entry(SCHEMAS["gemm"]), look_up(SCHEMAS["gemm"])
    one = torch.ones(1)
    a, b = (ops.quantize(x, one, dtype=torch.float8_e4m3fn) for x in (A, B))
    return {
        "empty": lambda: None,
        "direct": lambda: kernel(A, B, bias=None, out=OUT, layout="fprop", accumulate=False, out_dtype=None),
        "op": lambda: ops.gemm(A, B, out=OUT),
        "op, quantized operands": lambda: ops.gemm(a, b, out=OUT),
        "kernel found and checked, 2 operands": lambda: enter(A, B, None, None, "fprop", False, None),
        "kernel found, 2 operands": lambda: find(A, B, None, None, "fprop", False, None),
        "memo in force": current_memo,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=20000)
    options = parser.parse_args()
    te_hal.set_backend("null")
    functions = contestants()
    # Fills the memo, without which the shortened entry finds nothing.
    ops.gemm(A, B)
    for function in functions.values():
        function()
    found = microseconds(functions, options.rounds, options.calls)
    print(environment_line.describe())
    print(f"median of {options.rounds} rounds of {options.calls} calls, us per call")
    for name, value in found.items():
        print(f"  {name:40} {value:6.3f}")
    print(f"  {'op over direct (goal: 2)':40} {found['op'] - found['direct']:6.3f}")
    print(f"  {'kernel found, alone (goal: 0.5)':40} {found['kernel found, 2 operands']:6.3f}")


if __name__ == "__main__":
    main()
