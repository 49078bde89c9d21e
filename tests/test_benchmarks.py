"""The dispatch benchmark measures the entry that is generated, and says with what it ran."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import te_hal
from te_hal import ops
from te_hal.schema.catalog import SCHEMAS

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def dispatch(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import dispatch  # noqa: PLC0415 - found on the path from here on

    yield dispatch
    for name in ("dispatch", "environment_line"):
        sys.modules.pop(name, None)


def test_the_shortened_entry_finds_the_kernel_of_the_whole_one_and_checks_nothing(dispatch):
    find = dispatch.look_up(SCHEMAS["gemm"])
    te_hal.set_backend("null")
    ops.gemm(dispatch.A, dispatch.B)
    fitting = (dispatch.A, dispatch.B, None, None, "fprop", False, None)
    assert find(*fitting) is te_hal.get_backend().kernels["gemm"]
    misfit = (dispatch.A, torch.ones(3, 7, dtype=torch.bfloat16), *fitting[2:])
    assert find(*misfit) is te_hal.get_backend().kernels["gemm"]


def test_it_prints_its_machine_and_both_goals(dispatch, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dispatch.py", "--rounds", "1", "--calls", "5"])
    dispatch.main()
    printed = capsys.readouterr().out
    for said in (torch.__version__, te_hal.__version__, "op over direct (goal: 2)", "kernel found, alone (goal: 0.5)"):
        assert said in printed


@pytest.fixture
def gpu(monkeypatch):
    """benchmarks/gpu.py at sizes for a CPU."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu  # noqa: PLC0415 - found on the path from here on

    for name, value in {"DEVICE": "cpu", "SIZE": 64, "SCORES": (2, 16, 16), "GEMM": (32, 64, 48)}.items():
        monkeypatch.setattr(gpu, name, value)
    te_hal.set_backend("cpu_reference")
    yield gpu
    for name in ("gpu", "gpu_rows", "environment_line"):
        sys.modules.pop(name, None)


def test_every_row_of_the_gpu_benchmark_is_work_that_runs(gpu):
    # With scales per block, torch multiplies on a GPU alone.
    works = []
    for group in gpu.GROUPS:
        for row in group.rows():
            works.append(row.work)
            if row.work != "torch scaled_mm with blocks":
                row.run()
    assert len(works) == len(set(works)) > 40
    assert {group.base.work for group in gpu.GROUPS} <= set(works)


@pytest.mark.usefixtures("gpu")
def test_a_group_that_fails_is_said_and_leaves_the_others_their_turn(monkeypatch, tmp_path, capsys):
    import gpu_rows  # noqa: PLC0415 - as above

    monkeypatch.setattr(gpu_rows.environment_line, "describe", lambda _: "a machine")
    table = gpu_rows.Table(tmp_path / "rows.json")

    def broken() -> list[object]:
        message = "out of memory"
        raise RuntimeError(message)

    table.add(gpu_rows.Group("first", broken, lambda _: 1.0))
    table.add(gpu_rows.Group("second", lambda: [gpu_rows.Row("copy", print, 70.0)], lambda _: 50.0))
    table.add(gpu_rows.Group("third", lambda: [gpu_rows.Row("slow", print, 67.9)], lambda _: 60.0))
    assert table.failed
    kept = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["work"], row["us"], row["ratio"]) for row in kept] == [("copy", 50.0, 1.0), ("slow", 60.0, 1.2)]
    printed = capsys.readouterr().out.splitlines()
    assert "FAIL first: RuntimeError: out of memory" in printed
    # 60 us where the goal is as long as a copy, which took 50 us here.
    assert [line.split()[0] for line in printed if "MISSED" in line] == ["slow"]
