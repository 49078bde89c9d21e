"""What a small layer costs the host: Linear(128, 128) over a library whose kernels do nothing, beside nn.Linear.

    python benchmarks/linear_host.py [--rounds 300] [--calls 15]

Printed are the least and the median of the rounds, and the least as a ratio to nn.Linear's: other work on the machine
adds to every round, some add little. What a launch and memory of a device cost comes on top. The devices are CPU
tensors that a backend treats as a GPU's: every kernel asks which device and stream it is on.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import environment_line
import torch
from native_call import empty_library, measure

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.dispatch import Backend, register_backend
from te_hal.ffi.capability import ask
from te_hal.ffi.devices import Devices
from te_hal.ffi.marshalling import kernels
from te_hal.schema.backend import ALONG_THE_SUM

if TYPE_CHECKING:
    from collections.abc import Callable

#: As a GPU's, but that there is one device, which torch does not number.
DEVICES = Devices("cpu", stream=lambda _: 0, current=lambda: None, enter=lambda _: nullcontext())  # type: ignore[arg-type,return-value]
SIZE = 128
BF16 = torch.bfloat16


def register(folder: Path) -> None:
    """Put the backend in force; its products read copies as NVIDIA's do."""
    native = empty_library(folder, DEVICES)
    register_backend(
        Backend(
            name="empty",
            kernels=kernels(native),
            serves=frozenset({"cpu"}),
            supports=functools.partial(ask, native),
            gemm_copies=lambda layout, _format, _mode: ALONG_THE_SUM[layout],
        )
    )
    te_hal.set_backend("empty")


def step(module: torch.nn.Module, chosen: recipe.Recipe | None, *, backward: bool) -> Callable[[], None]:
    """A forward, or a forward and a backward, of a layer or of nn.Linear."""
    dtype = next(module.parameters()).dtype
    features = module.in_features
    x = torch.randn(features, features).to(dtype).requires_grad_()
    grad = torch.randn(features, features).to(dtype)

    def run() -> None:
        with te.autocast(recipe=chosen) if chosen is not None else nullcontext():
            y = module(x)
        if backward:
            x.grad = None
            module.zero_grad(set_to_none=True)
            y.backward(grad)

    return run


def contestants() -> dict[str, Callable[[], None]]:
    """Name and step. nn.Linear is so small that its products cost next to nothing, as the empty kernels do."""
    made: dict[str, Callable[[], None]] = {}
    recipes = {"delayed": recipe.DelayedScaling(), "current": recipe.Float8CurrentScaling()}
    for backward in (False, True):
        what = "fwd+bwd" if backward else "fwd"
        made[f"nn.Linear {what}"] = step(torch.nn.Linear(16, 16), None, backward=backward)
        for name, chosen in {"bf16": None, **recipes}.items():
            layer = te.Linear(SIZE, SIZE, params_dtype=BF16)
            made[f"Linear {name} {what}"] = step(layer, chosen, backward=backward)
    return made


def main() -> None:
    """Print one line per contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(environment_line.describe())
    with tempfile.TemporaryDirectory() as folder:
        register(Path(folder))
        plain = 0.0
        for name, run in contestants().items():
            run()
            least, median = measure(run, options.rounds, options.calls)
            plain = least if name.startswith("nn.") else plain
            print(f"{name:26s} {least:7.1f} us   median {median:7.1f}   {least / plain:5.1f} x nn.Linear")


if __name__ == "__main__":
    main()
