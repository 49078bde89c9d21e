"""Quantized tensors that go in and out of Linear: fp8_output, fp8_grad, Float8Tensor inputs, save_original_input."""

from __future__ import annotations

import copy

import closeness
import numpy as np
import pytest
import torch
from counting_backend import COLUMNWISE_IN_BACKWARD, Counting
from linear_emulation import E4M3, E5M2, array, cast, codes, current_scale, products, scale_for

import te_hal
import te_hal.modules as te
from te_hal import recipe

BF16 = torch.bfloat16
DTYPES = [torch.float32, BF16]

#: What fp32 sums and the rounding of a scale_inv may move, relative to the largest result; one rounding comes on top.
FP32_ERROR = 5e-6


def close(result: torch.Tensor, exact: torch.Tensor) -> bool:
    exact = exact.reshape(result.shape)
    return closeness.roundings(result.detach(), exact, FP32_ERROR * exact.abs().max()) <= 1


def quantized(values: np.ndarray, code=E4M3) -> np.ndarray:
    return cast(values, current_scale(values, code), code)


def decoded(tensor: te.Float8Tensor) -> np.ndarray:
    """The values of a Float8Tensor's rowwise copy, in float64."""
    dtype = {"kFloat8E4M3": E4M3, "kFloat8E5M2": E5M2}[tensor._fp8_dtype.name].dtype
    rows = tensor._data.reshape(-1, tensor.shape[-1]).numpy().view(dtype).astype(np.float64)
    return rows * np.float64(tensor._scale_inv.item())


def test_fp8_output_is_the_cast_of_the_result_under_current_scaling():
    module, x = te.Linear(32, 48), torch.randn(2, 8, 32)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        plain, y = module(x), module(x, fp8_output=True)
    assert isinstance(y, te.Float8Tensor)
    assert (y.dtype, y.shape) == (torch.float32, (2, 8, 48))
    assert y._columnwise_data is None
    rows = array(plain)
    expected = codes(rows, current_scale(rows, E4M3), E4M3).view(np.uint8).reshape(2, 8, 48)
    assert np.array_equal(y._data.numpy(), expected)


def test_fp8_output_under_delayed_scaling_comes_from_the_fp32_result_and_is_scaled_by_its_own_history():
    chosen, module = recipe.DelayedScaling(amax_history_len=2), te.Linear(32, 48, bias=False, params_dtype=BF16)
    x = torch.randn(16, 32, dtype=BF16) * 40
    with te.autocast(recipe=chosen):
        module(x, fp8_output=True)
    state = module.fp8_meta["scaling_fwd"]
    exact = (cast(array(x), np.float32(1), E4M3) @ cast(array(module.weight), np.float32(1), E4M3).T).astype(np.float32)
    recorded = state.amax_history[-1, 2].item()
    assert recorded == pytest.approx(np.abs(exact).max(), rel=1e-6)
    assert torch.tensor(recorded).bfloat16().item() != recorded  # it was not rounded to bf16 on the way
    assert state.scale[2] == scale_for(np.float32(recorded), E4M3)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fp8_grad_hands_a_quantized_gradient_to_the_input(name):
    chosen = recipe.DelayedScaling(amax_history_len=2) if name == "delayed" else recipe.Float8CurrentScaling()
    module, x, gy = te.Linear(32, 48), torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)
    for _ in range(2):
        gx, y = torch.empty(0), torch.empty(0)
        for fp8_grad, used in ((False, copy.deepcopy(module)), (True, module)):
            x.grad = None
            with te.autocast(recipe=chosen):
                y = used(x, fp8_grad=fp8_grad)
            scale = np.float32(used.fp8_meta["scaling_bwd"].scale[1].item()) if name == "delayed" else None
            y.backward(gy)
            gx = gx if fp8_grad else x.grad
        assert isinstance(x.grad, te.Float8Tensor)
        rows = array(gx)
        scale = current_scale(rows, E5M2) if scale is None else scale
        assert np.array_equal(x.grad._data.numpy(), codes(rows, scale, E5M2).view(np.uint8))
        if name == "delayed":
            assert module.fp8_meta["scaling_bwd"].amax_history[-1, 1] == gx.abs().max()


def test_fp8_grad_under_delayed_scaling_is_cast_from_the_fp32_gradient():
    module = te.Linear(32, 48, params_dtype=BF16)
    x = torch.randn(16, 32, dtype=BF16, requires_grad=True)
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=2)):
        y = module(x, fp8_grad=True)
    gy = torch.randn(16, 48, dtype=BF16)
    y.backward(gy)
    exact = cast(array(gy), np.float32(1), E5M2) @ cast(array(module.weight), np.float32(1), E4M3)
    recorded = module.fp8_meta["scaling_bwd"].amax_history[-1, 1].item()
    assert recorded == pytest.approx(np.abs(exact).max(), rel=1e-6)
    assert torch.tensor(recorded).bfloat16().item() != recorded


def test_gradients_summed_in_place_leave_no_amax_in_the_module():
    module, x = te.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    for _ in range(3):
        with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=8)):
            y = module(x, fp8_grad=True)
        y.backward(torch.ones(16, 48))
    history = module.fp8_meta["scaling_bwd"].amax_history[-3:, 1]
    assert x.grad.dequantize().abs().max() > 2 * history.max()
    assert history.max() < 1.2 * history.min()


@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_layers_hand_over_quantized_both_ways(name, dtype):
    chosen = recipe.DelayedScaling(amax_history_len=2) if name == "delayed" else recipe.Float8CurrentScaling()
    first, second = (te.Linear(*sizes, bias=False, params_dtype=dtype) for sizes in ((32, 48), (48, 16)))
    x = torch.randn(2, 8, 32, dtype=dtype, requires_grad=True)
    seen = {}
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        x.grad = None
        scales = {"w": np.float32(1), "gy": np.float32(1)}
        if name == "delayed" and second.fp8_initialized:
            scales = {key: np.float32(second.fp8_meta[f"scaling_{d}"].scale[i].item()) for key, d, i in SLOTS}
        if name == "current":
            scales["w"] = current_scale(array(second.weight), E4M3)
        with te.autocast(recipe=chosen):
            h = first(x, fp8_output=True)
            y = second(h, fp8_grad=True)
        h.register_hook(lambda grad: seen.__setitem__("gh", grad))
        gy = torch.randn(2, 8, 16, dtype=dtype)
        if name == "current":
            scales["gy"] = current_scale(array(gy), E5M2)
        y.backward(gy)
        weight = cast(array(second.weight), scales["w"], E4M3)
        grads = cast(array(gy), scales["gy"], E5M2)
        exact = products(decoded(h), weight, None, array(gy), grads)
        assert close(y, exact.y)
        assert close(second.weight.grad, exact.gw)
        assert isinstance(seen["gh"], te.Float8Tensor)
        gh = decoded(seen["gh"])
        assert closeness.relative_error(torch.from_numpy(gh), exact.gx) < 0.1  # E5M2 has 2 stored bits
        rows = array(x)
        scale = current_scale(rows, E4M3)
        if name == "delayed":
            continue
        assert close(first.weight.grad, torch.from_numpy(gh.T @ cast(rows, scale, E4M3)))
        assert close(x.grad, torch.from_numpy(gh @ quantized(array(first.weight))))


SLOTS = (("w", "fwd", 1), ("gy", "bwd", 0))


def quantizer(*, rowwise: bool, columnwise: bool) -> te.Float8CurrentScalingQuantizer:
    return te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, rowwise=rowwise, columnwise=columnwise)


COPIES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}


@pytest.mark.parametrize("reads", [None, COLUMNWISE_IN_BACKWARD], ids=["rowwise_gemms", "columnwise_gemms"])
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("shape", [(16, 32), (2, 8, 32)], ids=str)
def test_a_quantized_input_is_multiplied_as_it_is_whatever_copies_it_has(shape, name, reads):
    Counting(reads=reads)
    te_hal.set_backend("counting")
    module, x = te.Linear(32, 48, bias=False), torch.randn(shape, requires_grad=True)
    q = quantizer(rowwise=COPIES[name][0], columnwise=COPIES[name][1])(x)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = module(q)
    gy = torch.randn(*shape[:-1], 48)
    y.backward(gy)
    grads = array(gy)
    exact = products(quantized(array(x)), quantized(array(module.weight)), None, grads, quantized(grads, E5M2))
    assert y.shape == (*shape[:-1], 48)
    assert close(y, exact.y)
    assert close(x.grad, exact.gx)
    assert close(module.weight.grad, exact.gw)


def test_a_quantized_gradient_of_another_format_is_quantized_again():
    module, x = te.Linear(32, 48, bias=False), torch.randn(16, 32, requires_grad=True)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = module(x)
    gy = quantizer(rowwise=True, columnwise=False)(torch.randn(16, 48))
    y.backward(gy)
    grads = decoded(gy).astype(np.float32)
    exact = products(quantized(array(x)), quantized(array(module.weight)), None, grads, quantized(grads, E5M2))
    assert close(x.grad, exact.gx)
    assert close(module.weight.grad, exact.gw)


@pytest.mark.parametrize("autocast", [False, True], ids=["same_dtype", "torch_autocast"])
def test_without_fp8_a_quantized_input_is_dequantized(autocast):
    module, x = te.Linear(32, 48), torch.randn(16, 32)
    q = quantizer(rowwise=True, columnwise=False)(x.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(q)
    assert y.dtype == (BF16 if autocast else torch.float32)
    values = torch.from_numpy(quantized(array(x)))
    if autocast:
        values = values.bfloat16().double()
    weight = module.weight.detach().to(y.dtype).double()
    assert close(y, values @ weight.T)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(y, module(values.float()))
    y.sum().backward()
    assert close(x.grad, weight.sum(0).expand(16, 32).to(y.dtype).double())


@pytest.mark.parametrize("reads", [None, COLUMNWISE_IN_BACKWARD], ids=["rowwise_gemms", "columnwise_gemms"])
def test_save_original_input_gives_the_same_bytes_and_keeps_the_input_itself(reads):
    Counting(reads=reads)
    te_hal.set_backend("counting")
    default, original = te.Linear(32, 48), te.Linear(32, 48, save_original_input=True)
    original.load_state_dict(default.state_dict())
    x, gy = torch.randn(2, 8, 32), torch.randn(2, 8, 48)
    results = []
    for module in (default, original):
        kept = []
        inp = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):  # noqa: SIM117
            with te.autocast(recipe=recipe.Float8CurrentScaling()):
                y = module(inp)
        y.backward(gy)
        results.append([y, inp.grad, module.weight.grad])
        same_memory = [t.data_ptr() for t in kept if t.dtype == torch.float32 and t.numel() == x.numel()]
        assert same_memory == ([inp.data_ptr()] if module is original else [])
    assert all(map(torch.equal, *results))


def test_save_original_input_is_refused_under_delayed_scaling_before_anything_changes():
    module = te.Linear(32, 48, save_original_input=True, name="proj")
    with pytest.raises(ValueError, match=r"'proj'.*save_original_input.*delayed scaling"), te.autocast():
        module(torch.randn(16, 32))
    assert not module.fp8_initialized


def test_fp8_output_and_fp8_grad_have_no_effect_without_fp8():
    module, x = te.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    y = module(x, fp8_output=True, fp8_grad=True)
    y.sum().backward()
    assert type(y) is type(x.grad) is torch.Tensor
