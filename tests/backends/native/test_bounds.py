"""Ops with a bound: norms, softmax, activations and products stay within it of float64, rounded once."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from closeness import relative_error
from native_backends import same
from quantized_operands import columnwise_only, random_operand

import te_hal
from te_hal import ops
from te_hal.ops.activation_formulas import FORMULAS, GATES
from te_hal.schema.activation import ACTIVATIONS, GATED
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.formats import FLOATS, ColumnwiseOrder
from te_hal.schema.gemm import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from native_backends import NativeBackend

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
ROWS_AND_COLS = [(300, 7), (64, 136), (2, 3, 264), (1, 8192), (5, 16384), (600, 2048)]
KINDS = ("fp32", "fp16", "bf16", "e4m3", "e5m2")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(native: NativeBackend, op: str, *operands: Any, **flags: Any) -> tuple[torch.Tensor, ...]:
    """The op's results, on the CPU."""
    given = [native.put(x) for x in operands]
    named = {name: native.put(value) for name, value in flags.items()}
    with native.use():
        results = getattr(ops, op)(*given, **named)
    return tuple(r.cpu() for r in (results if isinstance(results, tuple) else (results,)))


def assert_close(op: str, found: torch.Tensor, exact: torch.Tensor) -> None:
    assert found.shape == exact.shape
    error = relative_error(found, exact)
    # The bound is of the root mean square over many roundings; a single one may be off by twice as much.
    few = 2 if found.numel() < 256 else 1
    assert error <= few * SCHEMAS[op].contract.bound[found.dtype], error


def gradients(result: Callable[..., torch.Tensor], grad: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The result and its gradients in float64, by torch's autograd."""
    leaves = [x.double().requires_grad_() for x in inputs]
    output = result(*leaves)
    output.backward(grad.double())
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


@DTYPES
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("norm", [layernorm, rmsnorm], ids=lambda norm: norm.__name__)
@pytest.mark.parametrize("shape", ROWS_AND_COLS, ids=str)
def test_norms(
    shape: tuple[int, ...],
    norm: Callable[..., torch.Tensor],
    zero_centered: bool,
    dtype: torch.dtype,
    ordered: NativeBackend,
) -> None:
    name, count = norm.__name__, 3 if norm is layernorm else 2
    x, grad = (draw(*shape, seed=1) * 3 + 1).to(dtype), draw(*shape, seed=2).to(dtype)
    weight, bias = draw(shape[-1], seed=3).to(dtype), draw(shape[-1], seed=4).to(dtype)
    gamma = weight.double() + 1.0 if zero_centered else weight
    exact, *exact_grads = gradients(norm, grad, *(x, gamma, bias)[:count])
    for out_dtype in {dtype, torch.float32}:
        given = (x, weight, bias)[:count]
        output, *statistics = run(
            ordered, f"{name}_fwd", *given, zero_centered_gamma=zero_centered, out_dtype=out_dtype
        )
        assert output.dtype == out_dtype
        assert_close(f"{name}_fwd", output, exact)
    grads = run(ordered, f"{name}_bwd", grad, x, *statistics, weight, zero_centered_gamma=zero_centered)
    assert len(grads) == len(exact_grads)
    for found, expected in zip(grads, exact_grads, strict=True):
        assert_close(f"{name}_bwd", found, expected)


SOFTMAXES = {
    "plain": {},
    "scaled": {"scale": 0.125},
    "masked": {"mask": (2, 1, 1, 40)},
    "masked per query": {"mask": (2, 3, 24, 40)},
    "causal": {"causal": "top_left"},
    "causal, to the bottom right": {"causal": "bottom_right"},
    "window": {"window": (5, 3)},
    "causal window": {"causal": "bottom_right", "window": (7, 0)},
    "all of it": {"mask": (24, 40), "causal": "bottom_right", "window": (9, 0), "scale": 0.3},
}


@DTYPES
@pytest.mark.parametrize("case", SOFTMAXES)
def test_softmax_equals_the_reference_in_what_it_hides_and_float64_in_what_it_shows(
    case: str, dtype: torch.dtype, ordered: NativeBackend
) -> None:
    flags = dict(SOFTMAXES[case])
    if "mask" in flags:
        flags["mask"] = draw(*flags["mask"], seed=9) > 0.4
    x, grad = (draw(2, 3, 24, 40) * 3).to(dtype), draw(2, 3, 24, 40, seed=1).to(dtype)
    with te_hal.use_backend("cpu_reference"):
        shown = ops.softmax_fwd(x.float(), **flags)
    (output,) = run(ordered, "softmax_fwd", x, **flags)
    assert same(output == 0, shown.to(dtype) == 0) or (shown[(output == 0) != (shown == 0)] < 1e-7).all()
    scores = (x.double() * flags.get("scale", 1.0)).masked_fill(shown == 0, float("-inf"))
    exact = torch.softmax(scores, -1).nan_to_num(0.0)
    assert_close("softmax_fwd", output, exact)
    (grad_input,) = run(ordered, "softmax_bwd", grad, output, scale=flags.get("scale", 1.0))
    y, g = output.double(), grad.double()
    exact_grad = flags.get("scale", 1.0) * y * (g - (g * y).sum(-1, keepdim=True))
    assert_close("softmax_bwd", grad_input, exact_grad)


@DTYPES
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 1, 8192), (4, 64, 256), (3, 5, 7)], ids=str)
def test_softmax_of_any_size(sizes: tuple[int, ...], dtype: torch.dtype, native: NativeBackend) -> None:
    x = (draw(*sizes) * 3).to(dtype)
    (output,) = run(native, "softmax_fwd", x, out_dtype=torch.float32)
    assert relative_error(output, torch.softmax(x.double(), -1)) <= 2e-6


def activation(name: str, x: torch.Tensor) -> torch.Tensor:
    """In float64, by the written formulas."""
    if name not in GATED:
        return FORMULAS[name].value(x)
    gate, linear = x.chunk(2, -1)
    if name != "clamped_swiglu":
        return FORMULAS[GATES[name]].value(gate) * linear
    return torch.clamp(gate, max=7.0) * torch.sigmoid(1.702 * torch.clamp(gate, max=7.0)) * (linear.clamp(-7, 7) + 1)


@DTYPES
@pytest.mark.parametrize("shape", [(300, 6), (64, 272), (2, 3, 528)], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, shape: tuple[int, ...], dtype: torch.dtype, ordered: NativeBackend) -> None:
    x = (draw(*shape) * 2).to(dtype)
    cols = shape[-1] // 2 if name in GATED else shape[-1]
    grad = draw(*shape[:-1], cols, seed=1).to(dtype)
    exact, exact_grad = gradients(lambda values: activation(name, values), grad, x)
    for out_dtype in {dtype, torch.float32}:
        flags = {"activation": name, "out_dtype": out_dtype}
        assert_close("activation_fwd", *run(ordered, "activation_fwd", x, **flags), exact)
        assert_close("activation_bwd", *run(ordered, "activation_bwd", grad, x, **flags), exact_grad)


SIZES = {"fprop": ((72, 40), (48, 40)), "dgrad": ((72, 48), (48, 40)), "wgrad": ((72, 48), (72, 40))}
ODD = {"fprop": ((13, 37), (29, 37)), "dgrad": ((13, 29), (29, 37)), "wgrad": ((13, 29), (13, 37))}


def product(a: torch.Tensor, b: torch.Tensor, layout: str) -> torch.Tensor:
    return (a.t() if layout == "wgrad" else a) @ (b.t() if layout == "fprop" else b)


@pytest.mark.parametrize("sizes", [SIZES, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids="-".join)
def test_every_pairing_of_operands(
    kinds: tuple[str, str], layout: str, sizes: dict[str, Any], ordered: NativeBackend
) -> None:
    generator = torch.Generator().manual_seed(0)
    (a, exact_a), (b, exact_b) = (
        random_operand(kind, shape, generator) for kind, shape in zip(kinds, sizes[layout], strict=True)
    )
    exact = product(exact_a, exact_b, layout)
    for dtype in FLOATS:
        (found,) = run(ordered, "gemm", a, b, layout=layout, out_dtype=dtype)
        assert_close("gemm", found, exact)


@pytest.mark.parametrize("order", ColumnwiseOrder)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_of_columnwise_copies(layout: str, order: ColumnwiseOrder, native: NativeBackend) -> None:
    generator = torch.Generator().manual_seed(0)
    (a, exact_a), (b, exact_b) = (
        random_operand(k, s, generator) for k, s in zip(("e4m3", "e5m2"), SIZES[layout], strict=True)
    )
    exact = product(exact_a, exact_b, layout)
    given = (columnwise_only(a, order), columnwise_only(b, order))
    (found,) = run(native, "gemm", *given, layout=layout, out_dtype=torch.bfloat16)
    assert_close("gemm", found, exact)


@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
def test_bias_and_accumulation_before_the_one_rounding(
    accumulate: bool, dtype: torch.dtype, native: NativeBackend
) -> None:
    generator = torch.Generator().manual_seed(0)
    (a, exact_a), (b, exact_b) = (random_operand(k, (64, 80), generator) for k in ("e4m3", "e4m3"))
    bias, out = draw(64, seed=1), draw(64, 64, seed=2).to(dtype)
    exact = exact_a @ exact_b.t() + bias.double() + (out.double() if accumulate else 0.0)
    (found,) = run(native, "gemm", a, b, bias=bias, out=out, accumulate=accumulate)
    assert_close("gemm", found, exact)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
def test_long_sums(kind: str, native: NativeBackend) -> None:
    generator = torch.Generator().manual_seed(0)
    (a, exact_a), (b, exact_b) = (random_operand(kind, (32, 8192), generator) for _ in range(2))
    for dtype in FLOATS:
        (found,) = run(native, "gemm", a, b, out_dtype=dtype)
        assert_close("gemm", found, exact_a @ exact_b.t())


@DTYPES
@pytest.mark.parametrize("shape", [(1, 300), (600, 2048), (300, 257), (5000, 264)], ids=str)
def test_bias_grad(shape: tuple[int, int], dtype: torch.dtype, ordered: NativeBackend) -> None:
    grad = draw(*shape).to(dtype)
    for out_dtype in {dtype, torch.float32}:
        (found,) = run(ordered, "bias_grad", grad, out_dtype=out_dtype)
        assert_close("bias_grad", found, grad.double().sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_same_call_gives_the_same_bytes(dtype: torch.dtype, native: NativeBackend) -> None:
    x, grad, weight = draw(300, 520).to(dtype), draw(300, 520, seed=1).to(dtype), draw(520, seed=2).to(dtype)
    _, rstd = run(native, "rmsnorm_fwd", x, weight)
    calls = [("rmsnorm_bwd", (grad, x, rstd, weight)), ("bias_grad", (grad,)), ("gemm", (x, grad))]
    for op, operands in calls:
        first, second = run(native, op, *operands), run(native, op, *operands)
        assert all(same(a, b) for a, b in zip(first, second, strict=True)), op
