"""FusedSGD against torch.optim.SGD in float64 and a loop over elements."""

from __future__ import annotations

import itertools

import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import ArgumentError, UnsupportedError

SETTINGS = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    for momentum, dampening, decay, nesterov in itertools.product([0.0, 0.9], [0.0, 0.3], [0.0, 0.1], [False, True])
    if not nesterov or (momentum and not dampening)
]


def normal(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in [(6, 5), (3,), ()]]


def step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], seed: int) -> None:
    for parameter, gradient in zip(parameters, normal(seed), strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_five_steps_are_those_of_torch_in_float64(settings):
    parameters = [torch.nn.Parameter(value) for value in normal(0)]
    doubles = [torch.nn.Parameter(value.double()) for value in normal(0)]
    one = te.optimizers.FusedSGD(parameters, 0.05, **settings)
    other = torch.optim.SGD(doubles, 0.05, **settings)
    for seed in range(1, 6):
        step(one, parameters, seed)
        step(other, doubles, seed)
    for parameter, double in zip(parameters, doubles, strict=True):
        # fp32's 6e-8 a rounding, a few of them a step.
        assert (parameter.double() - double).norm() <= 1e-6 * double.norm()


def test_weight_decay_after_the_momentum_stays_out_of_the_buffer():
    parameter = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = te.optimizers.FusedSGD([parameter], 0.1, momentum=0.5, weight_decay=0.25, wd_after_momentum=True)
    values, buffers = [2.0, -1.0], [0.0, 0.0]
    for number in range(3):
        parameter.grad = torch.tensor([1.0, 3.0])
        optimizer.step()
        for i, g in enumerate([1.0, 3.0]):
            buffers[i] = g if number == 0 else 0.5 * buffers[i] + g
            values[i] -= 0.1 * (buffers[i] + 0.25 * values[i])
    assert parameter.tolist() == pytest.approx(values, rel=1e-6)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == pytest.approx(buffers, rel=1e-6)


def test_masters_are_bit_equal_to_parameters_of_fp32():
    parameters = [torch.nn.Parameter(value.bfloat16()) for value in normal(0)]
    fp32 = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
    one = te.optimizers.FusedSGD(parameters, 0.05, momentum=0.9, weight_decay=0.1, master_weights=True)
    other = te.optimizers.FusedSGD(fp32, 0.05, momentum=0.9, weight_decay=0.1)
    for seed in range(1, 6):
        step(one, parameters, seed)
        for parameter, twin in zip(parameters, fp32, strict=True):
            twin.grad = parameter.grad.float()
        other.step()
    for parameter, twin in zip(parameters, fp32, strict=True):
        assert torch.equal(one.state[parameter]["master_param"], twin)
        assert torch.equal(parameter, twin.bfloat16())


def test_a_parameter_that_joins_later_starts_its_momentum_then():
    early, late = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = te.optimizers.FusedSGD([early, late], 1.0, momentum=0.5, dampening=0.5)
    early.grad = torch.ones(2)
    optimizer.step()
    late.grad = torch.ones(2)
    optimizer.step()
    assert early.tolist() == [-2.0, -2.0]  # 1, then 0.5 * 1 + 0.5 * 1
    assert late.tolist() == [-1.0, -1.0]


ARGUMENTS = {
    "materialize_master_grads": ({"materialize_master_grads": False}, UnsupportedError),
    "set_grad_none": ({"set_grad_none": False}, UnsupportedError),
    "momentum": ({"momentum": -0.1}, ArgumentError),
    "nesterov": ({"nesterov": True}, ArgumentError),
    "nesterov with dampening": ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ArgumentError),
    "wd_after_momentum": ({"wd_after_momentum": 1}, ArgumentError),
    "master_weights": ({"master_weights": None}, ArgumentError),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_bad_argument_is_refused_by_name(name):
    arguments, error = ARGUMENTS[name]
    with pytest.raises(error, match=f"FusedSGD: {next(iter(arguments))}: got"):
        te.optimizers.FusedSGD([torch.nn.Parameter(torch.zeros(2))], 0.1, **arguments)
