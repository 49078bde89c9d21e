"""Linear without FP8, against plain torch in float64."""

from __future__ import annotations

import math

import closeness
import pytest
import torch
from torch.nn import functional

import te_hal.modules as te

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: What fp32 sums may move, relative to the largest result; one rounding comes on top.
FP32_ERROR = 3e-6

SHAPES = [(32,), (7, 32), (2, 5, 32), (2, 3, 4, 32)]


def close(result: torch.Tensor, exact: torch.Tensor) -> bool:
    return closeness.roundings(result.detach(), exact, FP32_ERROR * exact.abs().max()) <= 1


def exact_step(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """y, gx, gw and, with a bias, gb in float64."""
    operands = [value.detach().double().requires_grad_() for value in (x, weight, bias) if value is not None]
    y = functional.linear(*operands)
    return (y.detach(), *torch.autograd.grad(y, operands, gy.double()))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_output_and_gradients_are_those_of_float64_rounded_once(dtype, shape, bias):
    module = te.Linear(32, 48, bias=bias, params_dtype=dtype)
    if bias:
        torch.nn.init.normal_(module.bias)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    gy = torch.randn(*shape[:-1], 48, dtype=dtype)
    y = module(x)
    y.backward(gy)
    found = [y, x.grad, module.weight.grad, *([module.bias.grad] if bias else [])]
    exact = exact_step(x, module.weight, module.bias if bias else None, gy)
    assert [value.shape for value in found] == [value.shape for value in exact]
    assert [value.dtype for value in found] == [dtype] * len(found)
    assert all(map(close, found, exact))


def test_return_bias_hands_the_bias_out_without_adding_it():
    module = te.Linear(32, 48, return_bias=True)
    torch.nn.init.normal_(module.bias)
    x = torch.randn(8, 32)
    y, bias = module(x)
    assert bias is module.bias
    assert close(y, x.double() @ module.weight.detach().double().T)
    (y + bias).sum().backward()
    assert torch.equal(module.bias.grad, torch.full((48,), 8.0))


def test_without_a_bias_return_bias_gives_an_empty_tensor_and_the_attribute_is_no_parameter():
    module = te.Linear(32, 48, bias=False, return_bias=True)
    _, bias = module(torch.randn(8, 32))
    assert bias.numel() == 0
    assert module.bias.numel() == 0
    assert dict(module.named_parameters()).keys() == {"weight"}


SPLITS = {
    "tuple": (("query", "key_", "value"), {"query": 16, "key": 16, "value": 16}),
    "list": (["query"], {"query": 48}),
    "mapping": ({"query": 32, "key": 8, "value": 8}, {"query": 32, "key": 8, "value": 8}),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_parameters_act_as_one_weight(name):
    split, rows = SPLITS[name]
    module = te.Linear(32, 48, parameters_split=split)
    parameters = dict(module.named_parameters())
    assert {key: tuple(value.shape) for key, value in parameters.items()} == {
        **{f"{part}_weight": (count, 32) for part, count in rows.items()},
        **{f"{part}_bias": (count,) for part, count in rows.items()},
    }
    for part in rows:
        torch.nn.init.normal_(parameters[f"{part}_bias"])
    x = torch.randn(8, 32, requires_grad=True)
    gy = torch.randn(8, 48)
    module(x).backward(gy)
    weight, bias = (torch.cat([parameters[f"{part}_{kind}"] for part in rows]) for kind in ("weight", "bias"))
    grads = [torch.cat([parameters[f"{part}_{kind}"].grad for part in rows]) for kind in ("weight", "bias")]
    _, gx, gw, gb = exact_step(x, weight, bias, gy)
    assert all(map(close, [x.grad, *grads], [gx, gw, gb]))


def test_a_frozen_part_of_a_split_weight_gets_no_gradient():
    module = te.Linear(32, 48, parameters_split=("query", "key"))
    module.query_weight.requires_grad_(False)
    module(torch.randn(8, 32)).sum().backward()
    assert module.query_weight.grad is None
    assert module.key_weight.grad is not None


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_an_empty_batch_gives_empty_results_and_zero_gradients(fp8):
    module = te.Linear(32, 48)
    x = torch.randn(0, 32, requires_grad=True)
    with te.autocast(enabled=fp8):
        y = module(x)
    y.sum().backward()
    assert y.shape == (0, 48)
    assert x.grad.shape == (0, 32)
    assert not module.weight.grad.any()
    assert not module.bias.grad.any()


def test_memory_order_of_input_and_gradient_does_not_matter():
    module = te.Linear(32, 48)
    x, gy = torch.randn(32, 6, 2).transpose(0, 2), torch.randn(48, 2, 6).permute(1, 2, 0)
    assert not x.is_contiguous()
    assert not gy.is_contiguous()
    x.requires_grad_()
    module(x).backward(gy)
    exact = exact_step(x, module.weight, module.bias, gy)
    assert all(map(close, [x.grad, module.weight.grad, module.bias.grad], exact[1:]))


def test_a_gradient_of_stride_zero_as_sum_gives_it_is_taken():
    module = te.Linear(32, 48)
    x = torch.randn(6, 32, requires_grad=True)
    module(x).sum().backward()
    assert close(x.grad, module.weight.detach().double().sum(0).expand(6, 32))


@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["input_only", "weight_only"])
def test_each_gradient_comes_without_the_other(needs):
    module = te.Linear(32, 48)
    module.weight.requires_grad_(needs[1])
    x = torch.randn(8, 32, requires_grad=needs[0])
    gy = torch.randn(8, 48)
    module(x).backward(gy)
    _, gx, gw, gb = exact_step(x, module.weight, module.bias, gy)
    assert (x.grad is not None) == needs[0]
    assert (module.weight.grad is not None) == needs[1]
    assert close(x.grad, gx) if needs[0] else close(module.weight.grad, gw)
    assert close(module.bias.grad, gb)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_the_bias_alone_can_be_trained(fp8):
    module = te.Linear(32, 48)
    module.weight.requires_grad_(requires_grad=False)
    with te.autocast(enabled=fp8):
        y = module(torch.randn(8, 32))
    y.sum().backward()
    assert torch.equal(module.bias.grad, torch.full((48,), 8.0))


def test_a_graph_that_is_kept_can_be_run_again():
    module = te.Linear(32, 48)
    y = module(torch.randn(8, 32)).sum()
    y.backward(retain_graph=True)
    once = module.weight.grad.clone()
    y.backward()
    assert torch.equal(module.weight.grad, 2 * once)


def test_an_input_written_to_before_its_backward_is_noticed():
    module = te.Linear(32, 48)
    x = torch.randn(8, 32)
    y = module(x)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weights_start_normal_with_a_deviation_of_23_thousandths_and_biases_at_zero():
    module = te.Linear(512, 512)
    assert math.isclose(module.weight.std().item(), 0.023, rel_tol=0.01)
    assert abs(module.weight.mean().item()) < 1e-3
    assert not module.bias.any()


def test_init_method_gets_each_weight_and_no_bias():
    seen = []
    module = te.Linear(32, 48, parameters_split=("a", "b"), init_method=seen.append)
    assert [id(tensor) for tensor in seen] == [id(module.a_weight), id(module.b_weight)]
    assert not module.a_bias.any()


def test_parameters_take_params_dtype_else_the_default_dtype():
    assert te.Linear(4, 4, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    torch.set_default_dtype(torch.float16)
    try:
        assert te.Linear(4, 4).bias.dtype == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)
