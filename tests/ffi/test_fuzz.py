"""No input to the ABI ends the process: a stretch of random calls in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_library import host_library_path, sanitizer_environment

HERE = Path(__file__).resolve().parent
#: Of the runs on the sanitizers' build, together.
SECONDS = float(os.environ.get("KERNEL_TEST_FUZZ_SECONDS", "60"))
SEEDS = (2, 3)
#: Entries that a few seconds get past the checks of.
FREQUENT = (
    *("quantize", "quantize_blocks", "dequantize", "amax", "transpose"),
    *("quantize_nvfp4", "dequantize_nvfp4", "gemm"),
)
BEYOND = """
import sys, torch
from native_table import Library
Library(sys.argv[1]).amax(torch.zeros(64), "FLOAT32", 4096, torch.zeros(1), 0, torch.zeros(512), 2048, 0)
"""


def run(*arguments, **environment):
    """A program's outcome; it can import the tests' modules."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])} | environment,
    )


def fuzz(library, seconds, seed, tmp_path, **environment):
    """Run the fuzzer; its counts, or a failure that names the call."""
    progress = tmp_path / "progress"
    result = run(HERE / "fuzz_entries.py", library, seconds, seed, progress, **environment)
    last = progress.read_text(encoding="utf-8").strip() if progress.exists() else "none"
    assert result.returncode == 0, f"seed and number of the last call: {last}\n{result.stderr[-4000:]}"
    return {entry: (int(done), int(refused)) for entry, done, refused in map(str.split, result.stdout.splitlines())}


def test_a_few_seconds_of_random_calls_end_in_documented_statuses(tmp_path):
    counts = fuzz(host_library_path(), 5, 1, tmp_path)

    assert all(refused > 0 for _, refused in counts.values())
    assert all(counts[entry][0] > 0 for entry in FREQUENT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_minute_of_random_calls_leaves_the_sanitizers_silent(tmp_path, seed):
    library = host_library_path("address")

    counts = fuzz(library, SECONDS / len(SEEDS), seed, tmp_path, **sanitizer_environment())

    assert all(refused > 0 for _, refused in counts.values())


@pytest.mark.slow
def test_the_sanitizers_would_report_a_read_beyond_a_tensor():
    result = run("-c", BEYOND, host_library_path("address"), **sanitizer_environment())

    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
