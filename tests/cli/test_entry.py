"""The `te-hal` command itself: with and without its libraries."""

import subprocess
import sys

import pytest

import te_hal
from te_hal.cli import LIBRARIES

BLOCKED = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {missing!r} else find_spec(name, *rest)
for name in {missing!r}:
    sys.modules[name] = None
from te_hal.cli import main
main()
"""


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("missing", [LIBRARIES, ("matplotlib",)], ids=",".join)
def test_without_its_libraries_the_command_says_in_one_line_what_to_install(missing):
    done = python("-c", BLOCKED.format(missing=missing))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f'te-hal: the command line needs {", ".join(missing)}: pip install "te-hal[cli]"'
    ]


def test_the_package_runs_as_the_command():
    done = python("-m", "te_hal.cli", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"te-hal {te_hal.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["nonsense"], ["compare", "--nonsense"], ["compare", "--steps", "many"]])
def test_what_it_does_not_know_is_refused_with_code_2(command_line, arguments):
    done = command_line.call(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert arguments[-1] in done.stderr or "--steps" in done.stderr
