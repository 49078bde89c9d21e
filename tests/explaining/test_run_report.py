"""te_hal.report: op, implementation, calls, fallbacks."""

import json

import pytest
import torch
from stub_backends import refuse, stub

import te_hal
from te_hal import Policy, ops
from te_hal.dispatch import FallbackWarning, register_backend

X = torch.ones(4, 8)


def test_before_a_run_there_is_nothing() -> None:
    assert str(te_hal.report()) == "no op has been called"
    assert te_hal.report().rows == ()


def test_after_a_run_there_is_a_row_per_op_and_implementation() -> None:
    register_backend(stub("picky", supports=refuse("it is Sunday")))
    ops.amax(X)
    ops.bias_grad(X)
    with te_hal.use_backend("picky"), te_hal.use_policy(Policy(fallback=("null",))):
        with pytest.warns(FallbackWarning):
            ops.amax(X)
        ops.amax(X)
    found = te_hal.report()
    assert [(row.op, row.backend, row.runs, row.calls, row.instead_of) for row in found.rows] == [
        ("amax", "cpu_reference", "kernel", 1, ""),
        ("amax", "null", "fallback", 2, "picky"),
        ("bias_grad", "cpu_reference", "composition", 1, ""),
    ]
    assert (found.calls, found.fallbacks) == (4, 2)
    assert str(found).splitlines() == [
        "4 calls of 2 ops, 2 by fallbacks",
        "  amax       1  cpu_reference (te_hal.backends.cpu_reference.amax.amax)",
        f"  amax       2  null, a fallback from picky ({found.rows[1].kernel})",
        "                  because picky it is Sunday",
        "  bias_grad  1  cpu_reference, composed (te_hal.ops.bias_grad._compose)",
        "                  because cpu_reference has no kernel for bias_grad",
    ]
    assert json.loads(json.dumps(found.as_dict()))["rows"][1]["reason"] == "it is Sunday"
