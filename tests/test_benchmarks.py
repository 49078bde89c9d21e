"""The dispatch benchmark measures the entry that is generated, and says with what it ran."""

from __future__ import annotations

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
