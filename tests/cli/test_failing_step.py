"""A step that fails in the middle of training: what is known is reported, and the checkpoint before it stays usable."""

import dataclasses
import functools
import json

import pytest

import te_hal
from te_hal.cli.progress import Lines
from te_hal.dispatch import register_backend
from te_hal.schema.errors import KernelError, UnsupportedError
from te_hal.schema.support import Code, Support

KERNEL = KernelError("gemm on backend fragile", got="a launch failure", accepted="none", todo="see the log")
LATE_NO = UnsupportedError("gemm on backend fragile", got="a shape too large", accepted="smaller", todo="shrink it")
OUT_OF_MEMORY = RuntimeError("out of memory: you tried to allocate 3 bytes")


class Fragile:
    """A backend over the reference's kernels whose gemm starts to raise after a step of a run."""

    def __init__(self, monkeypatch):
        self.error, self.last_good, self.broken = None, None, False
        kernels = te_hal.get_backend().kernels
        gemm = kernels["gemm"]

        @functools.wraps(gemm)
        def breaking(*arguments, **options):
            if self.broken:
                raise self.error
            return gemm(*arguments, **options)

        healthy = dataclasses.replace(te_hal.get_backend(), name="fragile", default_for=frozenset())
        register_backend(dataclasses.replace(healthy, kernels={**kernels, "gemm": breaking}))
        for told in ("start", "step"):
            monkeypatch.setattr(Lines, told, lambda _reporter, result: self._watch(result))

    def _watch(self, result):
        self.broken = self.broken or (result.name, result.steps) == self.last_good

    def break_after(self, run, steps, error):
        self.error, self.last_good = error, (run, steps)

    def repair(self):
        self.last_good, self.broken = None, False


@pytest.fixture
def fragile(monkeypatch):
    return Fragile(monkeypatch)


OPTIONS = ("--backend", "fragile", "--checkpoint-every", "4")


@pytest.mark.parametrize(
    "error", [KERNEL, LATE_NO, OUT_OF_MEMORY, MemoryError("no room")], ids=lambda e: type(e).__name__
)
def test_what_is_known_is_reported_and_written_with_code_1(command_line, fragile, error):
    fragile.break_after("delayed", 6, error)
    result = command_line.compare(*OPTIONS)
    assert result.exit_code == 1
    assert f"te-hal compare: delayed failed after 6 of 10 steps: {error}" in result.stderr
    assert "Traceback" not in result.stderr
    assert "delayed cannot be told yet: stopped after 6 of 10 steps" in result.stdout
    assert "--resume goes on after step 4 of delayed" in result.stdout
    record = command_line.record()
    assert [(run["name"], run["steps"]) for run in record["runs"]] == [("bf16", 10), ("bf16-2", 10), ("delayed", 6)]
    assert record["finished"] is False
    assert (command_line.out / "compare.png").exists()


def test_after_the_repair_resuming_gives_the_numbers_of_a_run_that_never_failed(command_line, fragile):
    def numbers():
        record = command_line.record()
        series = ("loss", "gradient_norm", "held_out")
        return json.dumps([[run["name"], *(run[name] for name in series)] for run in record["runs"]])

    fragile.break_after("delayed", 6, KERNEL)
    command_line.compare(*OPTIONS)
    fragile.repair()
    assert command_line.compare(*OPTIONS, "--resume").exit_code == 0
    resumed = numbers()
    assert command_line.compare(*OPTIONS).exit_code == 0
    assert resumed == numbers()


def test_a_failure_before_the_first_checkpoint_says_that_there_is_none(command_line, fragile):
    fragile.break_after("bf16", 0, KERNEL)
    result = command_line.compare(*OPTIONS)
    assert result.exit_code == 1
    assert "bf16 failed after 0 of 10 steps" in result.stderr
    assert "--resume has nothing to go on from" in result.stdout
    assert sorted(path.name for path in command_line.out.iterdir()) == ["compare.json", "compare.png"]


def test_the_checkpoint_of_another_comparison_is_not_taken_for_this_ones(command_line, fragile):
    command_line.compare("--stop-after", "3")
    before = (command_line.out / "compare.ckpt").read_bytes()
    fragile.break_after("bf16", 1, KERNEL)
    result = command_line.compare(*OPTIONS)
    assert "--resume has nothing to go on from" in result.stdout
    assert (command_line.out / "compare.ckpt").read_bytes() == before


@pytest.mark.parametrize(
    ("error", "code"), [(KERNEL, 1), (OUT_OF_MEMORY, 1), (LATE_NO, 2)], ids=["kernel", "torch", "no"]
)
def test_a_failure_while_measuring_trains_nothing(command_line, fragile, error, code):
    fragile.error, fragile.broken = error, True
    result = command_line.compare(*OPTIONS)
    assert result.exit_code == code
    assert str(error) in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(command_line.out.iterdir()) == []


def test_a_recipe_that_the_backend_lacks_is_wrong_input_found_before_training(command_line):
    def no_cast(call):
        return Support.no(Code.NO_KERNEL, "no FP8 here") if call.op == "quantize" else reference.supports(call)

    reference = te_hal.get_backend()
    register_backend(dataclasses.replace(reference, name="plain", default_for=frozenset(), supports=no_cast))
    result = command_line.compare("--backend", "plain")
    assert result.exit_code == 2
    assert "no FP8 here" in result.stderr
    assert list(command_line.out.iterdir()) == []
