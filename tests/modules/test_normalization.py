"""LayerNorm and RMSNorm, against float64."""

from __future__ import annotations

import closeness
import numpy as np
import pytest
import torch
from counting_backend import Counting
from torch.nn import functional

import te_hal
import te_hal.modules as te

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP32_ERROR = 2e-6  # of sums in fp32, relative to the largest result
KINDS = {"LayerNorm": te.LayerNorm, "RMSNorm": te.RMSNorm}
SHAPES = {"int": (96, (5, 96)), "tuple": ((4, 24), (3, 2, 4, 24)), "vector": (96, (96,)), "batch": ([24], (2, 3, 24))}
EPSILON = 1e-4


def exact(
    kind: str, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, shape: tuple[int, ...]
) -> torch.Tensor:
    if kind == "LayerNorm":
        return functional.layer_norm(x, shape, gamma, beta, EPSILON)
    return functional.rms_norm(x, shape, gamma, EPSILON)


@pytest.mark.parametrize("centered", [False, True], ids=["plain", "zero_centered"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_float64_rounded_once(kind, dtype, shape, centered):
    normalized_shape, input_shape = SHAPES[shape]
    module = KINDS[kind](normalized_shape, eps=EPSILON, zero_centered_gamma=centered, dtype=dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(input_shape, dtype=dtype, requires_grad=True)
    gy = torch.randn(input_shape, dtype=dtype)
    y = module(x)
    y.backward(gy)
    operands = [value.detach().double().requires_grad_() for value in (x, *module.parameters())]
    gamma = operands[1] + 1 if centered else operands[1]
    reference = exact(kind, operands[0], gamma, operands[2] if kind == "LayerNorm" else None, module.normalized_shape)
    expected = [reference.detach(), *torch.autograd.grad(reference, operands, gy.double())]
    found = [y, x.grad, *(parameter.grad for parameter in module.parameters())]
    assert [value.shape for value in found] == [value.shape for value in expected]
    for value, target in zip(found, expected, strict=True):
        assert value.dtype == dtype
        assert closeness.roundings(value, target, FP32_ERROR * target.abs().max()) <= 1


def test_rmsnorm_casts_once_at_the_end():
    module = te.RMSNorm(4096, dtype=torch.bfloat16)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(3, 4096, dtype=torch.bfloat16)
    x[1, 7] = 1e3
    y = module(x)
    rows = x.double()
    rstd = (1 / (rows.square().mean(-1, keepdim=True).float() + 1e-5).double().sqrt()).float()
    normalised = x.float() * rstd
    assert torch.equal(y, (normalised * module.weight.float()).bfloat16())
    early = normalised.bfloat16() * module.weight
    assert not torch.equal(y, early)  # the order of Hugging Face's RMSNorm, which docs/numerics.md (N2) names


def test_gamma_starts_at_one_or_as_zero_where_one_is_added():
    for centered, value in ((False, 1.0), (True, 0.0)):
        module = te.LayerNorm(8, zero_centered_gamma=centered)
        assert torch.equal(module.weight, torch.full((8,), value))
        assert torch.equal(module.bias, torch.zeros(8))
        assert torch.equal(module(torch.arange(8.0)), te.LayerNorm(8)(torch.arange(8.0)))


@pytest.mark.parametrize("kind", KINDS)
def test_zero_rows_and_empty_inputs_are_no_exception(kind):
    module = KINDS[kind](32)
    x = torch.randn(4, 32)
    x[2] = 0
    x.requires_grad_()
    y = module(x)
    y.sum().backward()
    assert not y[2].any()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    empty = torch.randn(0, 32, requires_grad=True)
    module(empty).sum().backward()
    assert empty.grad.shape == (0, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_row(kind):
    x = torch.randn(4, 32)
    x[2, 3] = float("nan")
    y = KINDS[kind](32)(x)
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_order_of_input_and_gradient_does_not_matter(kind):
    module = KINDS[kind](32, eps=EPSILON)
    x, gy = torch.randn(32, 6).t().requires_grad_(), torch.randn(32, 6).t()
    y = module(x)
    (gx,) = torch.autograd.grad(y, x, gy)
    rows = x.detach().double().requires_grad_()
    reference = exact(kind, rows, torch.ones(32).double(), torch.zeros(32).double(), (32,))
    (expected,) = torch.autograd.grad(reference, rows, gy.double())
    assert not x.is_contiguous()
    for value, target in ((y.detach(), reference.detach()), (gx, expected)):
        assert closeness.roundings(value, target, FP32_ERROR * target.abs().max()) <= 1


def test_only_gradients_asked_for_arrive():
    module = te.LayerNorm(32)
    module.weight.requires_grad_(requires_grad=False)
    module(torch.randn(4, 32)).sum().backward()
    assert module.weight.grad is None
    assert torch.equal(module.bias.grad, torch.full((32,), 4.0))


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_autocast_leaves_a_norm_alone(kind):
    module, x = KINDS[kind](32), torch.randn(4, 32)
    plain = module(x)
    with te.autocast():
        assert torch.equal(module(x), plain)


def test_quantized_inputs_and_gradients_are_dequantized():
    Counting()  # its kernels refuse quantized tensors
    te_hal.set_backend("counting")
    norm, linear = te.LayerNorm(32), te.Linear(32, 48)
    x = torch.randn(16, 32, requires_grad=True)
    q = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(x)
    plain = q.dequantize().detach()
    assert torch.equal(norm(q), norm(plain))
    with te.autocast():
        y = linear(norm(x), fp8_grad=True)
    seen = []
    y.grad_fn.register_hook(lambda grad_inputs, _: seen.append(grad_inputs[0]))
    y.sum().backward()
    assert isinstance(seen[0], te.Float8Tensor)
    (expected,) = torch.autograd.grad(norm(x), x, seen[0].dequantize())
    assert type(x.grad) is torch.Tensor
    assert torch.equal(x.grad, expected)


def test_older_argument_names_mean_the_same_and_may_not_contradict():
    assert te.LayerNorm(hidden_size=8).normalized_shape == (8,)
    assert te.RMSNorm(8, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    for arguments in ({}, {"normalized_shape": 8, "hidden_size": 16}):
        with pytest.raises(ValueError, match=r"normalized_shape=.*hidden_size="):
            te.LayerNorm(**arguments)
    with pytest.raises(ValueError, match=r"dtype=.*params_dtype="):
        te.LayerNorm(8, params_dtype=torch.float16, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [0, -1, (), (4, 0), 2.5, "8", (4, 2.0), True], ids=repr)
def test_a_normalized_shape_that_is_none_is_refused(shape):
    with pytest.raises(ValueError, match="normalized_shape"):
        te.LayerNorm(shape)


@pytest.mark.parametrize("epsilon", [-1.0, -1e-30, float("nan"), "a", None, True], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_an_epsilon_that_would_give_nan_is_refused_when_the_module_is_made(kind, epsilon):
    with pytest.raises(ValueError, match=f"{kind}: eps: got .*a number of at least 0"):
        KINDS[kind](16, eps=epsilon)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_assigned_later_count_and_are_checked_too(kind):
    module, x = KINDS[kind](16), torch.randn(4, 16)
    first = module(x)
    module.eps = 4.0
    assert torch.equal(module(x), KINDS[kind](16, eps=4.0)(x))
    assert not torch.equal(module(x), first)
    module.eps = -1.0
    with pytest.raises(ValueError, match=r"eps: got -1\.0"):
        module(x)
    module.eps, module.zero_centered_gamma = 1.0, "no"
    with pytest.raises(ValueError, match="zero_centered_gamma: got 'no'"):
        module(x)


@pytest.mark.parametrize("shape", [(), (4,), (4, 33), (24, 4), (96,)], ids=str)
def test_an_input_that_does_not_end_in_normalized_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"RMSNorm: input: got shape .*accepted: \[\.\.\., 4, 24\]"):
        te.RMSNorm((4, 24))(torch.zeros(shape))


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_dtypes_without_torch_autocast_are_refused(kind):
    with pytest.raises(ValueError, match=r"input of torch.bfloat16, weight of torch.float32"):
        KINDS[kind](32)(torch.zeros(4, 32, dtype=torch.bfloat16))


def test_the_reference_here_is_independent_of_torch_by_one_row_done_by_hand():
    x = np.array([1.0, 2.0, 3.0, 6.0])
    by_hand = (x - 3.0) / np.sqrt(3.5 + EPSILON)
    found = exact("LayerNorm", torch.from_numpy(x), torch.ones(4).double(), torch.zeros(4).double(), (4,))
    assert np.allclose(found.numpy(), by_hand, rtol=1e-12)
