"""fuse_wgrad_accumulation: the weight gradient goes into main_grad, added or overwritten as the flags say."""

from __future__ import annotations

import copy
import pickle

import closeness
import pytest
import torch
from linear_emulation import E4M3, E5M2, array, cast, current_scale

import te_hal.modules as te
from te_hal import recipe

STARTS_AT = 0.5


def fused(dtype: torch.dtype = torch.float32, main_dtype: torch.dtype = torch.float32) -> te.Linear:
    module = te.Linear(32, 48, params_dtype=dtype, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.full((48, 32), STARTS_AT, dtype=main_dtype)
    return module


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(16, 32, generator=generator).to(dtype), torch.randn(16, 48, generator=generator).to(dtype))
        for _ in range(count)
    ]


def exact_wgrad(x: torch.Tensor, gy: torch.Tensor) -> torch.Tensor:
    return gy.double().T @ x.double()


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within one rounding of what fp32 sums give."""
    return closeness.roundings(found, exact, 5e-6 * exact.abs().max()) <= 1


#: Flags of three microbatches, and how many of their gradients, from the end, main_grad holds; with what was in it?
FLAGS = {
    "none": ([None, None, None], 3, True),
    "first_then_more": ([True, False, False], 3, False),
    "more": ([False, False, False], 3, True),
    "first_last": ([None, False, True], 1, False),
    "always_first": ([True, True, True], 1, False),
    "first_in_the_middle": ([None, True, None], 2, False),
}


@pytest.mark.parametrize("name", FLAGS)
def test_true_overwrites_and_everything_else_adds(name):
    flags, counted, keeps_start = FLAGS[name]
    module, data = fused(), batches(3)
    for flag, (x, gy) in zip(flags, data, strict=True):
        module(x, is_first_microbatch=flag).backward(gy)
    exact = sum(exact_wgrad(x, gy) for x, gy in data[-counted:]) + (STARTS_AT if keeps_start else 0)
    assert near(module.weight.main_grad, exact)
    assert module.weight.grad is None
    assert near(module.bias.grad, sum(gy.double().sum(0) for _, gy in data))


@pytest.mark.parametrize("name", ["plain", "delayed", "current"])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_is_summed_in_fp32_and_rounded_once_per_microbatch(dtype, main_dtype, name):
    chosen = {"plain": None, "delayed": recipe.DelayedScaling(), "current": recipe.Float8CurrentScaling()}[name]
    module = fused(dtype, main_dtype)
    ((x, gy),) = batches(1, dtype)
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(x)
    y.backward(gy)
    rows, grads = array(x), array(gy)
    scales = (current_scale(rows, E4M3), current_scale(grads, E5M2)) if name == "current" else (1.0, 1.0)
    if name != "plain":
        rows, grads = cast(rows, scales[0], E4M3), cast(grads, scales[1], E5M2)
    exact = torch.from_numpy(grads.astype(float).T @ rows.astype(float)) + STARTS_AT
    assert near(module.weight.main_grad, exact)


def test_a_layer_used_twice_overwrites_once_and_adds_the_second_use():
    module, data = fused(), batches(2)
    y = [module(x, is_first_microbatch=True) for x, _ in data]
    torch.autograd.backward(y, [gy for _, gy in data])
    assert near(module.weight.main_grad, sum(exact_wgrad(x, gy) for x, gy in data))


def test_microbatches_that_share_one_backward_lose_none_of_their_gradients():
    module, data = fused(), batches(3)
    y = [module(x, is_first_microbatch=index == 0) for index, (x, _) in enumerate(data)]
    torch.autograd.backward(y, [gy for _, gy in data])
    assert near(module.weight.main_grad, sum(exact_wgrad(x, gy) for x, gy in data))


def test_forwards_and_backwards_may_be_interleaved():
    module, data = fused(), batches(3)
    first = module(data[0][0], is_first_microbatch=True)
    second = module(data[1][0], is_first_microbatch=False)
    first.backward(data[0][1])
    third = module(data[2][0], is_first_microbatch=False)
    second.backward(data[1][1])
    third.backward(data[2][1])
    assert near(module.weight.main_grad, sum(exact_wgrad(x, gy) for x, gy in data))


def test_a_first_microbatch_that_never_runs_backward_overwrites_nothing():
    module, data = fused(), batches(2)
    module(data[0][0], is_first_microbatch=True)
    module(data[1][0], is_first_microbatch=False).backward(data[1][1])
    assert near(module.weight.main_grad, exact_wgrad(*data[1]) + STARTS_AT)


def test_a_backward_run_twice_overwrites_then_adds():
    module, ((x, gy),) = fused(), batches(1)
    y = module(x, is_first_microbatch=True)
    y.backward(gy, retain_graph=True)
    y.backward(gy)
    assert near(module.weight.main_grad, 2 * exact_wgrad(x, gy))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copied_layer_has_no_first_microbatch_that_waits(copied):
    module, data = fused(), batches(2)
    y = module(data[0][0], is_first_microbatch=True)
    twin = copied(module)
    twin.weight.main_grad = torch.full((48, 32), STARTS_AT)
    twin(data[1][0], is_first_microbatch=False).backward(data[1][1])
    y.backward(data[0][1])
    assert near(twin.weight.main_grad, exact_wgrad(*data[1]) + STARTS_AT)
    assert near(module.weight.main_grad, exact_wgrad(*data[0]))


@pytest.mark.parametrize("flag", [None, True, False])
def test_overwrite_main_grad_never_adds(flag):
    module, data = fused(), batches(2)
    module.weight.overwrite_main_grad = True
    for x, gy in data:
        module(x, is_first_microbatch=flag).backward(gy)
    assert near(module.weight.main_grad, exact_wgrad(*data[1]))


def test_grad_added_to_main_grad_is_set_and_hooks_run_on_zeros():
    module, ((x, gy),) = fused(), batches(1)
    module.weight.grad_added_to_main_grad = False
    seen = []
    module.weight.register_hook(lambda grad: seen.append(grad.clone()))
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    module(x).backward(gy)
    assert module.weight.grad_added_to_main_grad is True
    assert [(grad.shape, bool(grad.any())) for grad in seen] == [((48, 32), False)] * 2
    assert module.weight.grad.is_contiguous()
    assert near(module.weight.main_grad, exact_wgrad(x, gy) + STARTS_AT)


def test_without_that_attribute_autograd_gets_nothing():
    module, ((x, gy),) = fused(), batches(1)
    module(x).backward(gy)
    assert module.weight.grad is None


def test_main_grad_may_be_a_view_into_a_buffer_of_several():
    module, ((x, gy),) = fused(), batches(1)
    buffer = torch.zeros(3, 48, 32)
    module.weight.main_grad = buffer[1]
    module(x).backward(gy)
    assert near(buffer[1], exact_wgrad(x, gy))
    assert not buffer[0].any()
    assert not buffer[2].any()


def test_the_main_grad_of_the_backward_counts():
    module, ((x, gy),) = fused(), batches(1)
    old, new = module.weight.main_grad, torch.zeros(48, 32)
    y = module(x)
    module.weight.main_grad = new
    y.backward(gy)
    assert near(new, exact_wgrad(x, gy))
    assert torch.equal(old, torch.full((48, 32), STARTS_AT))


def test_another_dtype_between_forward_and_backward_is_refused_naming_both():
    module, ((x, gy),) = fused(), batches(1)
    y = module(x)
    module.weight.main_grad = torch.zeros(48, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"torch\.bfloat16 in the backward.*torch\.float32"):
        y.backward(gy)


WRONG = {
    "missing": (None, "weight.main_grad = None"),
    "no_tensor": ([1.0], r"weight.main_grad = \[1.0\]"),
    "shape": (torch.zeros(32, 48), r"shape \(32, 48\)"),
    "broadcastable": (torch.zeros(48, 1), r"shape \(48, 1\)"),
    "dtype": (torch.zeros(48, 32, dtype=torch.float64), "torch.float64"),
    "device": (torch.zeros(48, 32, device="meta"), "on meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_main_grad_that_does_not_fit_is_refused_in_the_forward(name):
    value, message = WRONG[name]
    module = te.Linear(32, 48, fuse_wgrad_accumulation=True, name="proj")
    if value is not None:
        module.weight.main_grad = value
    with pytest.raises(RuntimeError, match=f"'proj': fuse_wgrad_accumulation: got .*{message}"):
        module(torch.randn(16, 32))


def test_no_main_grad_is_needed_where_there_is_no_weight_gradient():
    module = te.Linear(32, 48, fuse_wgrad_accumulation=True)
    with torch.no_grad():
        module(torch.randn(16, 32))
    module.weight.requires_grad_(requires_grad=False)
    module(torch.randn(16, 32, requires_grad=True)).sum().backward()


def test_a_main_grad_made_lazily_is_asked_for_in_the_backward_only():
    module, ((x, gy),) = te.Linear(32, 48, fuse_wgrad_accumulation=True), batches(1)
    made = []
    module.weight.__fsdp_param__ = True

    def make() -> torch.Tensor:
        made.append(torch.ones(48, 32))
        return made[-1]

    module.weight.get_main_grad = make
    y = module(x)
    assert made == []
    y.backward(gy)
    assert near(made[0], exact_wgrad(x, gy) + 1)


def test_several_weights_have_no_one_main_grad():
    with pytest.raises(ValueError, match=r"fuse_wgrad_accumulation.*3 weights by parameters_split"):
        te.Linear(32, 48, fuse_wgrad_accumulation=True, parameters_split=("q", "k", "v"))
