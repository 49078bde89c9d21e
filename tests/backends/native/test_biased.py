"""Ops with a bias that comes after the product: kernels against float64, and against their compositions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from closeness import relative_error
from native_backends import same

import te_hal
from te_hal import ops
from te_hal.ops.activation_formulas import FORMULAS
from te_hal.schema.activation import UNGATED
from te_hal.schema.biased import BIAS_ACTIVATION_BWD, BIAS_ACTIVATION_FWD
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from native_backends import NativeBackend

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
#: Tiles are 128 x 128: fewer, more, not whole, and rows that no vector divides.
SIZES = [(300, 6), (2, 3, 520), (1, 8), (129, 1031)]
SHAPES = pytest.mark.parametrize("shape", [(136, 264), *SIZES], ids=str)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(native: NativeBackend, op: str, *operands: torch.Tensor, **flags: Any) -> tuple[torch.Tensor | None, ...]:
    with native.use():
        results = getattr(ops, op)(*(native.put(x) for x in operands), **flags)
    found = results if isinstance(results, tuple) else (results,)
    return tuple(None if x is None else x.cpu() for x in found)


def by_reference(op: str, *operands: torch.Tensor, **flags: Any) -> Any:
    with te_hal.use_backend("cpu_reference"):
        return getattr(ops, op)(*operands, **flags)


@DTYPES
@pytest.mark.parametrize(
    ("activation", "shape"),
    [(name, (136, 264)) for name in UNGATED] + [("gelu", shape) for shape in SIZES],
    ids=str,
)
def test_the_activation_and_its_gradients_keep_their_bounds(
    activation: str, shape: tuple[int, ...], dtype: torch.dtype, native: NativeBackend
) -> None:
    x, bias, grad = ((draw(*s, seed=n) * 2).to(dtype) for n, s in enumerate((shape, shape[-1:], shape)))
    leaves = x.double().requires_grad_(), bias.double().requires_grad_()
    exact = FORMULAS[activation].value(leaves[0] + leaves[1])
    exact.backward(grad.double())
    few = 2 if x.numel() < 256 else 1  # bounds are of the root mean square over many roundings
    for out_dtype in {dtype, torch.float32}:
        flags = {"activation": activation, "out_dtype": out_dtype}
        (output,) = run(native, "bias_activation_fwd", x, bias, **flags)
        assert relative_error(output, exact.detach()) <= few * BIAS_ACTIVATION_FWD.contract.bound[out_dtype]
        grad_input, grad_bias = run(native, "bias_activation_bwd", grad, x, bias, **flags, bias_grad=True)
        assert relative_error(grad_input, leaves[0].grad) <= few * BIAS_ACTIVATION_BWD.contract.bound[out_dtype]
        assert grad_bias is not None
        assert grad_bias.dtype == dtype
        assert relative_error(grad_bias, leaves[1].grad) <= 2 * BIAS_ACTIVATION_BWD.contract.bound[dtype]
        assert run(native, "bias_activation_bwd", grad, x, bias, **flags)[1] is None


@DTYPES
@SHAPES
def test_a_residual_with_a_bias_has_the_bytes_of_two_fp32_sums_rounded_once(
    shape: tuple[int, ...], dtype: torch.dtype, ordered: NativeBackend
) -> None:
    x, bias, residual = ((draw(*s, seed=n) * 2).to(dtype) for n, s in enumerate((shape, shape[-1:], shape)))
    x.view(-1)[0], residual.view(-1)[1], bias[2] = float("nan"), float("inf"), float("-inf")
    expected = (residual.float() + (x.float() + bias.float())).to(dtype)
    (output,) = run(ordered, "bias_residual", x, bias, residual)
    assert same(output, expected)
    assert same(by_reference("bias_residual", x, bias, residual), expected)


@pytest.mark.parametrize("dtypes", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
def test_operands_may_each_have_a_dtype_of_their_own(dtypes: tuple[int, ...], native: NativeBackend) -> None:
    x, bias, other = (
        draw(*s, seed=n).to(FLOATS[index])
        for n, (s, index) in enumerate(zip([(40, 72), (72,), (40, 72)], dtypes, strict=True))
    )
    assert same(run(native, "bias_residual", x, bias, other)[0], by_reference("bias_residual", x, bias, other))
    flags = {"activation": "gelu", "bias_grad": True, "out_dtype": torch.float32}
    expected = by_reference("bias_activation_bwd", other, x, bias, **flags)
    for found, due in zip(run(native, "bias_activation_bwd", other, x, bias, **flags), expected, strict=True):
        assert found is not None
        assert found.dtype == due.dtype
        assert relative_error(found, due.double()) <= 2 * BIAS_ACTIVATION_BWD.contract.bound[found.dtype]


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_where_a_tensor_lies_changes_no_byte(offset: int, native: NativeBackend) -> None:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
        return room[offset:].view(tensor.shape).copy_(tensor)

    x, bias, grad = (draw(*s, seed=n).bfloat16() for n, s in enumerate(((136, 264), (264,), (136, 264))))
    flags = {"activation": "gelu", "bias_grad": True}
    plain = run(native, "bias_activation_bwd", grad, x, bias, **flags)
    with native.use():
        view = [moved(t).to(native.device) if native.device == "cpu" else native.put(t) for t in (grad, x, bias)]
        found = ops.bias_activation_bwd(*view, **flags)
    assert all(same(a.cpu() if a is not None else a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_nothing_in_gives_nothing_out_and_sums_of_zero(shape: tuple[int, int], native: NativeBackend) -> None:
    x, bias = torch.empty(shape), torch.ones(shape[1])
    flags = {"activation": "gelu", "bias_grad": True}
    assert run(native, "bias_residual", x, bias, x)[0].shape == shape
    grad_input, grad_bias = run(native, "bias_activation_bwd", x, x, bias, **flags)
    assert grad_input.shape == shape
    assert torch.equal(grad_bias, torch.zeros(shape[1]))
    (expected, sums) = by_reference("bias_activation_bwd", x, x, bias, **flags)
    assert (expected.shape, sums.shape) == (grad_input.shape, grad_bias.shape)
