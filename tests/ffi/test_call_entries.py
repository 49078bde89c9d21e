"""Every result is written whole, and nothing is read that nobody wrote: the same calls over different old bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_library import host_library_path
from native_table import parameters

HERE = Path(__file__).resolve().parent
#: Launch work, but not here: one compares an instruction with the software, one is called through arrays of the host.
ELSEWHERE = {"select_fp8_encoder", "update_delayed_scales"}


def digests(fill: int) -> list[str]:
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(HERE / "call_entries.py"), str(host_library_path()), "--fill", str(fill)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def over_zeros() -> list[str]:
    return digests(0)


def test_results_do_not_depend_on_what_their_memory_and_the_workspace_held(over_zeros):
    assert digests(255) == over_zeros


def test_every_entry_that_launches_work_is_called(over_zeros):
    called = {line.partition(") ")[2].split()[0] for line in over_zeros}
    assert called == {name for name, given in parameters().items() if ("uintptr_t", "stream") in given} - ELSEWHERE
