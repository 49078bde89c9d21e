"""Mode large: what is wrong beyond an index is found, at a limit that a test can afford."""

from __future__ import annotations

import functools

import pytest
import torch
from faulty_backends import REFERENCE, faulty, same

from te_hal.ffi.devices import HOST
from te_hal.ffi.native import Native
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.storage import QuantizedStorage
from te_hal.testing import Lists, Status, Subject, Tested, large

CPU = torch.device("cpu")
LIMIT = 300_000
#: Elements that the kernel below gets right.
REACH = 250_000


def outcomes(backend, op, limit=LIMIT):
    return list(large.check_large(Tested(backend, CPU, Lists()), op.__eq__, limit))


def stops_short(right):
    """As if an index had wrapped: what lies behind is whatever lay there."""

    @functools.wraps(right)
    def kernel(*operands, **flags):
        result = right(*operands, **flags)
        tensors = result.tensors() if isinstance(result, QuantizedStorage) else result
        for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
            if tensor is not None and tensor.numel() > REACH:
                tensor.view(-1).view(torch.uint8)[REACH:] = 0x5B
        return result

    return kernel


WITH_KERNEL = ("quantize", "dequantize", "compute_scale", "gemm", "rmsnorm_fwd", "layernorm_bwd", "softmax_bwd")


@pytest.mark.parametrize("op", WITH_KERNEL)
def test_a_result_that_is_wrong_beyond_an_index_is_found_in_every_setting(op):
    found = outcomes(faulty(op, stops_short), op)
    assert found
    assert {outcome.status for outcome in found} == {Status.FAILED}
    assert all("repetition" in str(outcome.findings[0]) for outcome in found)


@pytest.mark.parametrize("op", WITH_KERNEL)
def test_a_right_result_passes(op):
    assert {outcome.status for outcome in outcomes(faulty(op, same), op)} == {Status.PASSED}


def test_an_amax_that_sees_the_first_elements_only_is_found():
    def change(right):
        def amax(input, *, out=None):
            return right(input.reshape(-1)[: REACH // 10] * 0.5 if input.numel() > REACH else input, out=out)

        return amax

    found = outcomes(faulty("amax", change), "amax")
    assert "is not that of the small call" in str(found[0].findings[0])


@pytest.mark.parametrize("reach", [0, REACH], ids=["small", "large"])
def test_a_kernel_that_fails_is_a_finding_and_the_next_op_is_checked(reach):
    def change(right):
        def amax(input, *, out=None):
            if input.numel() > reach:
                raise RuntimeError("the device has caught fire")
            return right(input, out=out)

        return amax

    backend = faulty("amax", change)
    found = list(large.check_large(Tested(backend, CPU, Lists()), {"amax", "compute_scale"}.__contains__, LIMIT))
    assert [(outcome.op, outcome.status) for outcome in found] == [
        ("amax", Status.FAILED),
        ("compute_scale", Status.PASSED),
    ]
    assert "RuntimeError: the device has caught fire" in str(found[0].findings[0])


def test_what_does_not_fit_into_memory_is_skipped_and_says_so(monkeypatch):
    monkeypatch.setattr(large, "_free", lambda _: 1 << 10)
    (found,) = outcomes(REFERENCE, "amax")
    assert (found.status, "not enough memory" in found.reason) == (Status.SKIPPED, True)


def test_native_kernels_pass():
    if not Native("musa_emulator", "host", HOST).opens():
        pytest.skip("the host's kernel library is not built")
    tested = Subject("musa_emulator").prepare()
    found = list(large.check_large(tested, SCHEMAS.__contains__, LIMIT))
    assert [(o.case, *map(str, o.findings)) for o in found if o.status is not Status.PASSED] == []
    assert len({o.op for o in found}) > 15
