"""No input to the ABI ends the process: a stretch of random calls in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from te_hal.ffi.build import build
from te_hal.ffi.toolchains import TOOLCHAINS

HERE = Path(__file__).resolve().parent


def fuzz(library, seconds, seed, tmp_path, **environment):
    """Run the fuzzer; its counts, or a failure that names the call."""
    progress = tmp_path / "progress"
    result = subprocess.run(
        [sys.executable, str(HERE / "fuzz_entries.py"), str(library), str(seconds), str(seed), str(progress)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parent)} | environment,
    )
    last = progress.read_text(encoding="utf-8").strip() if progress.exists() else "none"
    assert result.returncode == 0, f"seed and number of the last call: {last}\n{result.stderr[-4000:]}"
    return {entry: (int(done), int(refused)) for entry, done, refused in map(str.split, result.stdout.splitlines())}


def test_a_few_seconds_of_random_calls_end_in_documented_statuses(tmp_path):
    counts = fuzz(build("host"), 5, 1, tmp_path)

    assert all(refused > 0 for _, refused in counts.values())
    assert all(counts[entry][0] > 0 for entry in ("quantize", "quantize_blocks", "dequantize", "amax", "transpose"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_minute_of_random_calls_leaves_the_sanitizers_silent(tmp_path, seed):
    compiler = TOOLCHAINS["host"].find()
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(runtime).is_absolute() for runtime in runtimes):
        pytest.skip("the compiler has no sanitizers' libraries")

    fuzz(
        build("host", sanitizer="address"), 30, seed, tmp_path,
        LD_PRELOAD=" ".join(runtimes), ASAN_OPTIONS="detect_leaks=0",
    )  # fmt: skip
