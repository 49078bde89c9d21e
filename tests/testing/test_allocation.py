"""Memory that a backend makes by a way of its own is watched too, once the backend names that way."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
import torch
from faulty_backends import faulty

from te_hal.ffi.devices import HOST
from te_hal.ffi.native import Native
from te_hal.testing import Case, Kind, Lists, Session, Status, Subject, Tested, describe, run_case

CPU = torch.device("cpu")
SPARE = 8


def by_numpy(shape, dtype, device):
    """Past torch's functions, with room behind it that nobody watches."""
    assert str(device) == "cpu"
    count = int(np.prod(shape))
    memory = np.zeros(count * dtype.itemsize + SPARE, dtype=np.uint8)
    return torch.from_numpy(memory)[: count * dtype.itemsize].view(dtype).view(tuple(shape))


def backend_with(allocator, *, past_the_end: bool):
    def change(right):
        def amax(input, *, out=None):
            result = allocator.empty((1,), torch.float32, input.device)
            result.copy_(right(input, out=out))
            if past_the_end:
                result.as_strided((2,), (1,), result.storage_offset())[1] = 7.0
            return result if out is None else out

        return amax

    return faulty("amax", change)


@pytest.mark.parametrize(("named", "kinds"), [(False, []), (True, [Kind.OUTSIDE])], ids=["unnamed", "named"])
def test_a_write_past_a_result_is_seen_where_the_allocator_is_named(named, kinds):
    allocator = types.SimpleNamespace(empty=by_numpy)
    backend = backend_with(allocator, past_the_end=True)
    backend = dataclasses.replace(backend, allocator=allocator) if named else backend
    outcome = run_case(Tested(backend, CPU, Lists()), Case.of("amax:everyday"))
    assert sorted({finding.kind for finding in outcome.findings}) == kinds


def test_a_sound_backend_passes_and_has_its_allocator_back():
    allocator = types.SimpleNamespace(empty=by_numpy)
    backend = dataclasses.replace(backend_with(allocator, past_the_end=False), allocator=allocator)
    outcome = run_case(Tested(backend, CPU, Lists()), Case.of("amax:everyday"))
    assert (outcome.status, outcome.watched) == (Status.PASSED, True)
    assert allocator.empty is by_numpy


def past_torch(input, *, out=None):
    found = by_numpy((1,), torch.float32, "cpu") if out is None else out
    return found.copy_(input.float().abs().max())


def fails(input, *, out=None):  # noqa: ARG001 - the signature of the op
    raise RuntimeError


@pytest.mark.parametrize(
    ("kernel", "allocates", "is_said"),
    [(past_torch, True, True), (past_torch, False, False), (fails, True, False)],
    ids=["results", "plain_torch", "no_results"],
)
def test_unwatched_results_are_counted_where_a_backend_allocates_on_its_own(kernel, allocates, is_said):
    tested = Tested(faulty("amax", lambda right: kernel), CPU, Lists())  # noqa: ARG005
    outcomes = (run_case(tested, Case.of("amax:everyday")),)
    text = describe(Session(Subject("faulty", "cpu"), "chosen", outcomes, (), 0.0, allocates))
    assert ("1 of 1 cases wrote results into memory" in text) is is_said


@pytest.mark.parametrize(
    "case", ["quantize:columnwise=true", "gemm:everyday", "layernorm_bwd:everyday", "amax:everyday"]
)
def test_the_results_of_native_kernels_lie_in_watched_memory(case):
    if not Native("musa_emulator", "host", HOST).opens():
        pytest.skip("the host's kernel library is not built")
    assert run_case(Subject("musa_emulator").prepare(), Case.of(case)).watched
