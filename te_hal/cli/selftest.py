"""`te-hal selftest`: whether the kernels do on this device what they do in the tests; the output goes into a report."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

import te_hal
from te_hal import ops
from te_hal.cli.failure import FAILED, WRONG_INPUT, fail, wrong_input_ends
from te_hal.dispatch import forced_backend, use_backend
from te_hal.ffi.native import native_of
from te_hal.ffi.selftest import Selftest
from te_hal.ffi.sources import source_hash

if TYPE_CHECKING:
    from te_hal.dispatch import Backend
    from te_hal.ffi.native import Native


def selftest(
    backend: Annotated[str, typer.Option(help="Backend to test: musa, cuda or musa_emulator.")],
    device: Annotated[int, typer.Option(help="Number of the device.", min=0)] = 0,
) -> None:
    """Check a backend's kernels on this machine: rounding, the FP8 encoder, then the ops against cpu_reference."""
    with wrong_input_ends(), use_backend(backend):
        tested = forced_backend()
        native = native_of(backend)
    if tested is None or native is None:
        fail(f"backend {backend!r} runs no kernel library; choose musa, cuda or musa_emulator", WRONG_INPUT)
    else:
        _report(tested, native, device)


def _reference(op: str, operands: tuple[Any, ...], flags: dict[str, Any]) -> Any:  # noqa: ANN401 - as the op has it
    with use_backend("cpu_reference"):
        return getattr(ops, op)(*operands, **flags)


def _report(tested: Backend, native: Native, number: int) -> None:
    (device_type,) = tested.serves
    device = torch.device(device_type) if device_type == "cpu" else torch.device(device_type, number)
    library = native.library
    same_sources = "as these sources" if library.source_hash == source_hash() else "of OTHER sources"
    print(f"te_hal {te_hal.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"library {library.path}: {', '.join(library.architectures)}; {library.compiler}; hash {library.source_hash}")
    print(f"        {same_sources}")
    failed = skipped = 0
    for check in Selftest(tested, _reference, library, device, native.stream(device)).checks():
        print(f"{'skip' if check.skipped else 'pass' if check.passed else 'FAIL'}  {check.name}: {check.detail}")
        failed += not check.passed
        skipped += check.skipped
    if failed:
        fail(f"{failed} checks of backend {tested.name} failed", FAILED)
    rest = f"; {skipped} were skipped for want of a kernel" if skipped else ""
    print(f"every check of backend {tested.name} passed{rest}")
