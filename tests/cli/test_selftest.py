"""`te-hal selftest`: it tells a sound device from an unsound one, and says what it ran on."""

from __future__ import annotations

import native_backends
import pytest
import torch
from stub_backends import stub

from te_hal.dispatch import registry
from te_hal.ffi.native import native_of
from te_hal.ffi.selftest import Selftest


@pytest.fixture
def _emulator() -> None:
    native_backends.emulator()


@pytest.mark.usefixtures("_emulator")
def test_the_emulator_passes_and_the_report_names_library_and_device(command_line):
    done = command_line.call("selftest", "--backend", "musa_emulator")
    assert done.exit_code == 0, done.stdout
    assert "FAIL" not in done.stdout
    assert "every check of backend musa_emulator passed" in done.stdout
    for words in ("host emulation", "division", "square root", "FP8 encoder", "quantize(", "gemm(layout=wgrad"):
        assert words in done.stdout
    for op in ("quantize_current", "layernorm_quantize", "activation_bwd_quantize", "update_delayed_scales"):
        assert f"pass  {op}(" in done.stdout


@pytest.mark.usefixtures("_emulator")
def test_a_kernel_that_is_wrong_or_fails_is_a_failed_check():
    source = registry.tables().backends["musa_emulator"]
    native = native_of("musa_emulator")

    def wrong(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return source.kernels["amax"](input, out=out) * 1.0000002

    def failing(*_: object, **__: object) -> None:
        msg = "the board is on fire"
        raise RuntimeError(msg)

    def one_code_off(*args: object, **flags: object) -> object:
        storage, sums = source.kernels["bias_grad_quantize"](*args, **flags)
        storage.rowwise_data[0, 0] ^= 1
        return storage, sums

    def much_is_off(*args: object, **flags: object) -> object:
        storage, rstd = source.kernels["rmsnorm_quantize"](*args, **flags)
        storage.rowwise_data[::100] ^= 1
        return storage, rstd

    fused = {"bias_grad_quantize": one_code_off, "rmsnorm_quantize": much_is_off}
    kernels = {**source.kernels, "amax": wrong, "softmax_fwd": failing, **fused}
    tested = stub("unsound", kernels=kernels)
    reference = registry.tables().backends["cpu_reference"]

    def run(op: str, operands: tuple, flags: dict) -> object:
        return reference.kernels.get(op, source.kernels[op])(*operands, **flags)

    checks = list(Selftest(tested, run, native.library, torch.device("cpu"), 0).checks())
    failed = {check.name.partition("(")[0] for check in checks if not check.passed}
    assert failed == {"amax", "atomic maximum", "softmax_fwd", *fused}
    assert any("RuntimeError: the board is on fire" in check.detail for check in checks)


@pytest.mark.usefixtures("_emulator")
def test_an_op_that_the_backend_lacks_is_skipped_by_name():
    source = registry.tables().backends["musa_emulator"]
    tested = stub("skeleton", kernels={"amax": source.kernels["amax"]})

    def run(op: str, operands: tuple, flags: dict) -> object:
        return source.kernels[op](*operands, **flags)

    library = native_of("musa_emulator").library
    checks = list(Selftest(tested, run, library, torch.device("cpu"), 0).checks())
    said = {check.name: check.detail for check in checks if check.skipped}
    assert said["gemm"] == "has no kernel for gemm"
    assert said["division"] == "has no kernel for compute_scale"
    assert all(check.passed for check in checks)
    assert "amax" not in said


def test_a_backend_without_a_kernel_library_is_refused(command_line):
    done = command_line.call("selftest", "--backend", "cpu_reference")
    assert done.exit_code == 2
    assert "runs no kernel library" in done.stderr


def test_an_unusable_backend_is_refused_with_its_reason(command_line):
    done = command_line.call("selftest", "--backend", "musa")
    assert done.exit_code == 2
    assert "torch_musa is not installed" in done.stderr
