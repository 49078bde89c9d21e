"""Plain tensors that an op writes: refused where torch would fail inside the kernel, taken where it would not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import te_hal
from te_hal import ops
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

X = torch.ones(4, 4)
ONE = torch.ones(1)

#: Operand to (a call that writes it, a fresh one, an expanded one or None where it has a single element).
WRITES: dict[str, tuple[Callable[[torch.Tensor], object], tuple[int, ...], torch.Tensor | None]] = {
    "gemm: out": (lambda t: ops.gemm(X, X, out=t), (4, 4), torch.ones(4).expand(4, 4)),
    "amax: out": (lambda t: ops.amax(X, out=t), (1,), None),
    "quantize: amax": (lambda t: ops.quantize(X, ONE, amax=t, dtype=torch.float8_e5m2), (1,), None),
    "update_delayed_scale: amax_history": (
        lambda t: ops.update_delayed_scale(t, torch.ones(4), fp8_max=448.0),
        (2, 4),
        torch.ones(1, 4).expand(2, 4),
    ),
    "update_delayed_scale: scale": (
        lambda t: ops.update_delayed_scale(torch.ones(2, 4), t, fp8_max=448.0),
        (4,),
        torch.ones(1).expand(4),
    ),
}


@pytest.fixture(autouse=True)
def _cpu_reference_in_force() -> None:
    te_hal.set_backend("cpu_reference")


@pytest.mark.parametrize("where", WRITES)
def test_a_written_tensor_that_requires_a_gradient_is_refused(where: str) -> None:
    call, shape, _ = WRITES[where]
    call(torch.ones(shape))
    for written in (torch.ones(shape, requires_grad=True), torch.ones(shape, requires_grad=True) * 2):
        with pytest.raises(ArgumentError, match=r"requires a gradient.*\.detach\(\)") as error:
            call(written)
        assert error.value.where == where


@pytest.mark.parametrize("where", WRITES)
def test_without_gradients_a_parameter_may_be_written(where: str) -> None:
    call, shape, _ = WRITES[where]
    written = torch.full(shape, 0.5, requires_grad=True)
    with torch.no_grad():
        call(written)
    assert not torch.equal(written, torch.full(shape, 0.5))


@pytest.mark.parametrize("where", [where for where, (_, _, expanded) in WRITES.items() if expanded is not None])
def test_an_expanded_tensor_is_refused(where: str) -> None:
    call, shape, expanded = WRITES[where]
    call(torch.ones(shape))
    with pytest.raises(ArgumentError, match=r"an expanded tensor, shape .* with strides .*\.clone\(\)") as error:
        call(expanded)
    assert error.value.where == where


def test_a_strided_view_is_written() -> None:
    out = torch.zeros(4, 8)[:, ::2]
    assert ops.gemm(X, X, out=out) is out
    assert torch.equal(out, X @ X.t())
