"""use_observer: sees every kernel that is bound inside its block, and leaves nothing behind."""

from __future__ import annotations

import threading

import pytest
import torch

import te_hal
from te_hal import ops
from te_hal.dispatch import Binding, current_memo, current_selection, resolve, use_observer
from te_hal.schema.support import Call

X = torch.ones(4)
AMAX = Call("amax", torch.device("cpu"), {"input": torch.float32, "out": None})


@pytest.fixture
def seen():
    return []


def zero(input, *, out=None):
    """An amax of its own."""
    return torch.zeros_like(input[:1] if out is None else out)


def watching(seen):
    def note(binding: Binding):
        seen.append(binding)
        return binding.kernel

    return note


def test_a_public_op_is_bound_once_and_shared(seen) -> None:
    te_hal.list_backends()  # the first question about backends finds them, and renews every memo
    with use_observer(watching(seen)):
        for _ in range(3):
            ops.amax(X)
    assert [(b.call.op, b.backend.name, b.shared, b.part) for b in seen] == [("amax", "cpu_reference", True, False)]


def test_a_resolved_kernel_belongs_to_who_asked(seen) -> None:
    with use_observer(watching(seen)):
        resolve(AMAX)
    assert [(b.shared, b.part) for b in seen] == [(False, False)]


def test_the_parts_of_a_composition_come_before_it(seen) -> None:
    with use_observer(watching(seen)):
        ops.quantize_current(torch.ones(16, 16), dtype=torch.float8_e4m3fn)
    assert [b.call.op for b in seen] == ["amax", "compute_scale", "quantize", "quantize_current"]
    assert [b.part for b in seen] == [True, True, True, False]


def test_what_the_observer_gives_is_what_runs_inside_and_only_there() -> None:
    before = ops.amax(X)
    with use_observer(lambda _: zero):
        assert ops.amax(X).item() == 0
    assert torch.equal(ops.amax(X), before)


def test_scopes_inside_keep_the_observer_and_none_lifts_it(seen) -> None:
    with use_observer(watching(seen)):
        with te_hal.use_backend("null"), te_hal.use_policy(te_hal.Policy()):
            ops.amax(X)
        with use_observer(None):
            ops.amax(X)
    assert [b.backend.name for b in seen] == ["null"]


def test_another_selection_may_be_asked_without_being_observed(seen) -> None:
    plain = current_selection()
    with use_observer(watching(seen)):
        assert resolve(AMAX, plain).backend.name == "cpu_reference"
    assert seen == []


def test_other_threads_are_not_observed(seen) -> None:
    with use_observer(watching(seen)):
        thread = threading.Thread(target=ops.amax, args=(X,))
        thread.start()
        thread.join()
    assert seen == []


def test_the_memo_is_another_one_inside_and_the_old_one_after() -> None:
    before = current_memo()
    with use_observer(lambda binding: binding.kernel):
        assert current_memo() is not before
    assert current_memo() is before
