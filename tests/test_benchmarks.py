"""The dispatch benchmark measures the entry that is generated, and says with what it ran."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

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


@pytest.fixture
def session(monkeypatch):
    """benchmarks/gpu_session.py, as if backend cuda could be used."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_session  # noqa: PLC0415 - found on the path from here on

    usable = [SimpleNamespace(name="cuda", usable=True, reason="")]
    monkeypatch.setattr(gpu_session.te_hal, "list_backends", lambda: usable)
    yield gpu_session
    sys.modules.pop("gpu_session", None)


def test_every_file_that_a_session_on_a_gpu_runs_exists(session):
    for part in session.parts():
        files = [word for word in part.command if word.startswith(("benchmarks/", "examples/", "tests/"))]
        assert [word for word in files if not (FOLDER.parent / word).exists()] == []


def test_a_session_goes_on_after_a_part_that_fails_hangs_or_lacks_something(session, monkeypatch, tmp_path, capsys):
    say = [sys.executable, "-c"]
    chosen = [
        session.Part("fails", 20, [*say, "print('before'); raise SystemExit(3)"]),
        session.Part("hangs", 1, [*say, "import time; time.sleep(60)"]),
        session.Part("lacks", 20, ["no-such-checker"]),
        session.Part("works", 20, [*say, "print('OUT/x')"]),
    ]
    monkeypatch.setattr(session, "parts", lambda: chosen)
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", "--out", str(tmp_path)])
    assert session.main() == 1
    ends = capsys.readouterr().out.splitlines()[-4:]
    assert ends == [
        "FAIL  fails status 3",
        "FAIL  hangs ended after 1 s",
        "FAIL  lacks no-such-checker is not on the path",
        "pass  works ",
    ]
    log = (tmp_path / "session.txt").read_text()
    assert "before" in log
    assert str(tmp_path / "x") in log


def test_a_session_without_a_gpu_says_so_and_runs_nothing(session, monkeypatch, tmp_path, capsys):
    unusable = [SimpleNamespace(name="cuda", usable=False, reason="no GPU here")]
    monkeypatch.setattr(session.te_hal, "list_backends", lambda: unusable)
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", "--out", str(tmp_path / "out")])
    assert session.main() == 2
    assert "no GPU here" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_every_row_of_the_transformer_benchmark_runs_and_keeps_what_the_formula_says(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_transformer  # noqa: PLC0415 - as above

    sizes = {"DEVICE": "cpu", "COPIED": 16, "SEQUENCE": 16, "BATCH": 2, "HIDDEN": 32, "HEADS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(gpu_transformer, name, value)
    te_hal.set_backend("cpu_reference")
    for row in (*gpu_transformer.layer_rows(), *gpu_transformer.attention_rows()):
        row.run()
    for numbers in gpu_transformer.saved_bytes().values():
        assert numbers["kept"] == numbers["weights"] + numbers["formula"]
    assert "MORE" not in capsys.readouterr().out
    for name in ("gpu_transformer", "gpu_rows", "environment_line"):
        sys.modules.pop(name, None)


def test_every_contestant_of_the_gpt_step_has_its_turn(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpt_step  # noqa: PLC0415 - as above

    steps = gpt_step.contestants(gpt_step.Sizes(width=32, heads=2, layers=1, feed_forward=64, sequence=16, batch=2))
    times = gpt_step.run_in_turn(steps, 2)
    assert set(gpt_step.GOALS) | {other for goals in gpt_step.GOALS.values() for other in goals} == set(times)
    assert all(0 < time.least <= time.median for time in times.values())
    for name in ("gpt_step", "gpt_model", "environment_line"):
        sys.modules.pop(name, None)


def test_the_contestants_of_the_layer_compute_the_same(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import layer_cpu  # noqa: PLC0415 - found on the path from here on

    sizes = layer_cpu.Sizes(width=64, heads=4, feed_forward=128, sequence=16, batch=2)
    found = {name: layer_cpu.one_step(of, sizes)().float() for name, of in layer_cpu.CONTESTANTS.items()}
    exact = found["torch fp32"]
    for name, result in found.items():
        bound = 1e-5 if "fp32" in name else 2e-2 if "bf16" in name else 0.1
        assert (result - exact).norm() <= bound * exact.norm(), name
    assert all(goal[0] in found for of in layer_cpu.CONTESTANTS.values() for goal in of.goals)
    for name in ("layer_cpu", "gpt_step", "gpt_model", "environment_line"):
        sys.modules.pop(name, None)
