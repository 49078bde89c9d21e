"""How fast the emulated device is: input of casts and amax in MB/s, beside another build of the kernels.

    python benchmarks/emulator.py [--prototype LIBRARY] [--rounds 15]

The prototype is the host library that the kernels started from, with a table of its own; the goal is 80% of its rate.
Both run a bf16 tensor of 1024x1024 on one thread, in sequence, in turns, and the best round counts: other work on the
machine only ever takes time away. Without a prototype the rates are printed alone.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import environment_line
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from native_table import Library

from te_hal.ffi.build import build

if TYPE_CHECKING:
    from collections.abc import Callable

    Cases = dict[str, Callable[[], int]]

SIZE = 1024
ORDER = (1, 32, -1)  # threads of the host, wave, seed: in sequence
GOAL = 0.8


class Operands:
    """One input and room for every result, aligned by torch to 64 bytes."""

    def __init__(self) -> None:
        self.input = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        self.scale, self.amax = torch.full((1,), 2.0), torch.zeros(1)
        self.rows = torch.zeros(SIZE, SIZE, dtype=torch.uint8)
        self.columns = torch.zeros_like(self.rows)
        self.workspace = torch.zeros(1 << 16)


def own_cases(data: Operands) -> Cases:
    """The library of these sources."""
    library = Library(build("host"))
    library.configure_emulator(*ORDER)
    given = (data.input, "BFLOAT16", SIZE, SIZE, data.scale, data.amax)
    rest = (0, None, None, "FLOAT8_E4M3", 0)
    room = (data.workspace, 4 * data.workspace.numel())
    return {
        "amax": lambda: library.amax(data.input, "BFLOAT16", data.input.numel(), data.amax, 0, *room, 0),
        "cast row": lambda: library.quantize(*given, data.rows, None, *rest),
        "cast row + col": lambda: library.quantize(*given, data.rows, data.columns, *rest),
    }


class PrototypeTable(ctypes.Structure):
    """The start of the prototype's table."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi", ctypes.c_uint32),
        ("backend", ctypes.c_char_p),
        ("noop", ctypes.c_void_p),
        ("amax", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 3, *[ctypes.c_int64] * 2, ctypes.c_size_t)),
        ("quantize", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 6, *[ctypes.c_int64] * 4, ctypes.c_size_t)),
    )


def prototype_cases(data: Operands, path: Path) -> Cases:
    """The same three of the prototype."""
    library = ctypes.CDLL(str(path))
    library.te_get_api.restype = ctypes.POINTER(PrototypeTable)
    table = library.te_get_api(1).contents
    library.te_host_config(*ORDER, 1)
    source, rows, columns, scale, amax, room = (
        tensor.data_ptr() for tensor in (data.input, data.rows, data.columns, data.scale, data.amax, data.workspace)
    )
    size = 4 * data.workspace.numel()
    return {
        "amax": lambda: table.amax(source, amax, room, size, data.input.numel(), 0),
        "cast row": lambda: table.quantize(source, rows, 0, scale, amax, room, size, SIZE, SIZE, 0, 0),
        "cast row + col": lambda: table.quantize(source, rows, columns, scale, amax, room, size, SIZE, SIZE, 0, 0),
    }


def best_seconds(calls: list[Callable[[], int]], rounds: int) -> list[float]:
    """The shortest time of each call, all of them once in every round."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            status = call()
            best[index] = min(best[index], time.perf_counter() - start)
            if status != 0:
                msg = f"status {status}"
                raise RuntimeError(msg)
    return best


def main() -> None:
    """Print the rates, and their ratio to the prototype's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prototype", type=Path, help="its host library")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(environment_line.describe())
    data = Operands()
    contestants = [own_cases(data)] + ([prototype_cases(data, options.prototype)] if options.prototype else [])
    for name in contestants[0]:
        times = best_seconds([cases[name] for cases in contestants], options.rounds)
        rates = [data.input.nbytes / seconds / 1e6 for seconds in times]
        beside = "" if len(rates) == 1 else f", {rates[0] / rates[1]:.2f} of the prototype (goal: {GOAL})"
        print(f"{name:<15} {rates[0]:6.0f} MB/s{beside}")


if __name__ == "__main__":
    main()
