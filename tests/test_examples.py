"""Every example runs on its own, as its reader would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_without_a_warning(path, tmp_path):
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""


def test_the_first_example_prints_finite_gradients(tmp_path):
    (first,) = [path for path in EXAMPLES if path.stem == "first_fp8_linear"]
    done = subprocess.run([sys.executable, str(first)], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("output (2048, 3072)")
    # The loss is a plain sum over 2048 rows, so every element of the bias gradient is 2048.
    norm = float(lines[2].rpartition(" ")[2])
    assert norm == pytest.approx(2048 * 3072**0.5, rel=1e-6)
