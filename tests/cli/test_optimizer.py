"""MasterAdamW against torch's own AdamW and clipping."""

import math

import pytest
import torch
from torch import nn

from te_hal.cli.optimizer import MasterAdamW

CPU = torch.device("cpu")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def backward(model, step):
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
    (50 * model(inputs).float().square().mean()).backward()


def test_fp32_steps_are_those_of_torch():
    model, reference = make_model(), make_model()
    optimizer = MasterAdamW(model, torch.float32, CPU)
    adamw = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(5):
        backward(model, step)
        backward(reference, step)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        assert optimizer.step(0.01).norm == pytest.approx(norm.item(), rel=1e-6)
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)


def test_an_update_too_small_for_bf16_is_not_lost():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = MasterAdamW(model, torch.bfloat16, CPU)
    for _ in range(10):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(1e-3)
    # One step of 1e-3 is a quarter of bf16's spacing below 1.
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == pytest.approx(0.99, abs=0.002)


def test_a_bf16_model_starts_from_the_fp32_values():
    model, fp32 = make_model(), make_model()
    masters = MasterAdamW(model, torch.bfloat16, CPU).state_dict()["masters"]
    for parameter, master, expected in zip(model.parameters(), masters, fp32.parameters(), strict=True):
        assert torch.equal(master, expected)
        assert torch.equal(parameter, expected.bfloat16())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradients_are_counted_and_raise_nothing(value):
    model = make_model()
    optimizer = MasterAdamW(model, torch.bfloat16, CPU)
    backward(model, 0)
    model[0].weight.grad[0, :3] = value
    gradients = optimizer.step(0.01)
    assert gradients.nonfinite == 3
    assert not math.isfinite(gradients.norm)


@pytest.mark.parametrize(("dtype", "per_parameter"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_its_bytes_are_two_moments_and_a_master_where_the_parameter_is_none(dtype, per_parameter):
    model = make_model()
    optimizer = MasterAdamW(model, dtype, CPU)
    backward(model, 0)
    optimizer.step(0.01)
    count = sum(p.numel() for p in model.parameters())
    step_counters = 4 * len(list(model.parameters()))
    assert optimizer.nbytes() == per_parameter * count + step_counters
