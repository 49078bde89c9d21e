"""FusedAdam against recorded values, torch.optim in float64, ml_dtypes and a loop over elements."""

from __future__ import annotations

import math

import golden_values
import ml_dtypes
import numpy as np
import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import ArgumentError, UnknownNameError, UnsupportedError

SHAPES = [(5, 7), (3,), (), (0, 4)]


def normal(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def made(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(value) for value in normal(seed, dtype)]


def step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], seed: int) -> None:
    for parameter, gradient in zip(parameters, normal(seed), strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).norm() <= bound * other.double().norm()


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_three_recorded_steps_lie_within_the_recorded_bound():
    values = golden_values.load("functional")
    names = ["p0", "p1"]
    parameters = [torch.nn.Parameter(values[f"adam/adamw/{name}/init"].clone()) for name in names]
    optimizer = te.optimizers.FusedAdam(parameters, lr=1e-2, weight_decay=0.1)
    for number in range(3):
        for name, parameter in zip(names, parameters, strict=True):
            parameter.grad = values[f"adam/adamw/{name}/grad{number}"].clone()
        optimizer.step()
        assert_near(parameters, [values[f"adam/adamw/{name}/after{number}"] for name in names], 1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("decoupled", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_five_steps_are_those_of_torch_in_float64(decoupled, reference, decay):
    parameters, doubles = made(), [torch.nn.Parameter(value.double()) for value in made()]
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": decay}
    one = te.optimizers.FusedAdam(parameters, adam_w_mode=decoupled, **settings)
    other = reference(doubles, **settings)
    for seed in range(1, 6):
        step(one, parameters, seed)
        step(other, doubles, seed)
    assert_near(parameters, doubles, 1e-6)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_element_follows_the_formula(decoupled, bias_correction):
    parameters = made()
    optimizer = te.optimizers.FusedAdam(
        parameters, lr=0.02, weight_decay=0.3, adam_w_mode=decoupled, bias_correction=bias_correction
    )
    expected, moments = [p.detach().double().flatten().tolist() for p in parameters], {}
    for t in range(1, 4):
        step(optimizer, parameters, t)
        for number, (elements, gradient) in enumerate(zip(expected, normal(t), strict=True)):
            for i, given in enumerate(gradient.double().flatten().tolist()):
                p, (m, v) = elements[i], moments.get((number, i), (0.0, 0.0))
                g = given if decoupled else given + 0.3 * p
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                moments[number, i] = m, v
                c1, c2 = (1 - 0.9**t, 1 - 0.999**t) if bias_correction else (1.0, 1.0)
                elements[i] = p - 0.02 * (m / c1 / (math.sqrt(v / c2) + 1e-8) + (0.3 * p if decoupled else 0.0))
    for parameter, elements in zip(parameters, expected, strict=True):
        assert_near([parameter.flatten()], [torch.tensor(elements, dtype=torch.float64)], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_are_bit_equal_to_parameters_of_fp32(dtype):
    parameters = made(dtype=dtype)
    fp32 = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
    one = te.optimizers.FusedAdam(parameters, lr=1e-2, weight_decay=0.1, master_weights=True)
    other = te.optimizers.FusedAdam(fp32, lr=1e-2, weight_decay=0.1)
    for seed in range(1, 6):
        for parameter, twin, gradient in zip(parameters, fp32, normal(seed), strict=True):
            parameter.grad = gradient.to(dtype)
            twin.grad = parameter.grad.float()
        one.step()
        other.step()
    assert_same([one.state[parameter]["master_param"] for parameter in parameters], fp32)
    assert_same(parameters, [value.to(dtype) for value in fp32])


def test_a_bf16_parameter_and_its_remainder_are_the_master():
    parameters, others = made(dtype=torch.bfloat16), made(dtype=torch.bfloat16)
    settings = {"lr": 1e-2, "weight_decay": 0.1, "master_weights": True}
    one = te.optimizers.FusedAdam(parameters, store_param_remainders=True, **settings)
    other = te.optimizers.FusedAdam(others, **settings)
    for seed in range(1, 6):
        step(one, parameters, seed)
        step(other, others, seed)
    for parameter, plain in zip(parameters, others, strict=True):
        remainder, master = one.state[parameter]["master_param"], other.state[plain]["master_param"]
        assert remainder.dtype == torch.int16
        bits = (parameter.detach().view(torch.int16).numpy().astype(np.int64) << 16) + remainder.numpy()
        assert np.array_equal(bits.astype(np.int32), master.view(torch.int32).numpy())
        assert torch.equal(one.get_unscaled_state(parameter, "master_param"), master)
        tie = remainder == -(2**15)
        assert torch.equal(parameter[~tie], plain[~tie])


def test_without_masters_each_step_starts_from_the_rounded_parameter():
    parameter = torch.nn.Parameter(torch.full((8,), 1.0, dtype=torch.bfloat16))
    kept = torch.nn.Parameter(torch.full((8,), 1.0, dtype=torch.bfloat16))
    one = te.optimizers.FusedAdam([parameter], lr=1e-3)
    other = te.optimizers.FusedAdam([kept], lr=1e-3, master_weights=True)
    for _ in range(8):  # steps of 0.001, below half a bf16 step at 1 (0.002)
        parameter.grad = kept.grad = torch.ones(8, dtype=torch.bfloat16)
        one.step()
        other.step()
    assert torch.equal(parameter, torch.ones(8, dtype=torch.bfloat16))
    assert torch.equal(kept, torch.full((8,), 0.992, dtype=torch.bfloat16))


def test_an_fp32_parameter_is_its_own_master():
    parameters = made()
    optimizer = te.optimizers.FusedAdam(parameters, master_weights=True)
    step(optimizer, parameters, 1)
    assert all("master_param" not in optimizer.state[parameter] for parameter in parameters)


# Moments in fewer bits


def as_fp32_moments(parameters: list[torch.nn.Parameter]) -> te.optimizers.FusedAdam:
    return te.optimizers.FusedAdam(parameters)


def test_a_moment_of_8_bits_is_the_e4m3_code_under_its_own_scale():
    parameters, others = made(), made()
    one, other = te.optimizers.FusedAdam(parameters, exp_avg_dtype=torch.uint8), as_fp32_moments(others)
    step(one, parameters, 1)
    step(other, others, 1)
    for parameter, plain in zip(parameters[:3], others[:3], strict=True):
        state, exact = one.state[parameter], other.state[plain]["exp_avg"].numpy()
        scale = np.float32(448) / np.abs(exact).max()
        codes = (exact * scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(state["exp_avg"].numpy(), codes)
        assert state["exp_avg_scale_inv"].tolist() == [np.float32(1) / scale]
    assert_same(parameters, others)  # the step itself used the exact moment


def test_a_moment_of_fp16_puts_its_largest_value_at_half_the_range():
    parameters = made()
    optimizer = te.optimizers.FusedAdam(parameters, exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16)
    step(optimizer, parameters, 1)
    for name in ("exp_avg", "exp_avg_sq"):
        stored = optimizer.state[parameters[0]][name]
        assert stored.dtype == torch.float16
        assert stored.abs().max().item() == 32752.0


def test_a_moment_of_bf16_is_the_rounded_one_without_scale():
    parameters, others = made(), made()
    one, other = te.optimizers.FusedAdam(parameters, exp_avg_sq_dtype=torch.bfloat16), as_fp32_moments(others)
    step(one, parameters, 1)
    step(other, others, 1)
    for parameter, plain in zip(parameters, others, strict=True):
        assert torch.equal(one.state[parameter]["exp_avg_sq"], other.state[plain]["exp_avg_sq"].bfloat16())
        assert "exp_avg_sq_scale_inv" not in one.state[parameter]


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8], ids=str)
def test_a_moment_without_a_usable_scale_has_scale_1(dtype, value):
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = te.optimizers.FusedAdam([parameter], exp_avg_dtype=dtype)
    optimizer.set_scaled_state(parameter, "exp_avg", torch.tensor([value, 0.0, value]))
    assert optimizer.state[parameter]["exp_avg_scale_inv"].tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_training_with_moments_in_fewer_bits_stays_close_to_fp32(dtype):
    parameters, others = made(), made()
    one, other = te.optimizers.FusedAdam(parameters, lr=1e-2, exp_avg_dtype=dtype), as_fp32_moments(others)
    other.param_groups[0]["lr"] = 1e-2
    for seed in range(1, 9):
        step(one, parameters, seed)
        step(other, others, seed)
    assert_near(parameters[:1], others[:1], 5e-3)
    assert not torch.equal(parameters[0], others[0])


# Around a step


def test_gradients_come_from_the_decoupled_attribute_where_asked_for():
    parameters, others = made(), made()
    one = te.optimizers.FusedAdam(parameters, use_decoupled_grad=True)
    other = te.optimizers.FusedAdam(others)
    for parameter, gradient in zip(parameters, normal(1), strict=True):
        parameter.grad, parameter.decoupled_grad = torch.full_like(gradient, 9.0), gradient
    one.step()
    step(other, others, 1)
    assert_same(parameters, others)


def test_parameters_without_gradient_stay_and_the_closure_runs_with_gradients():
    moved, left = made()[:2]
    optimizer = te.optimizers.FusedAdam([moved, left])
    before = left.detach().clone()

    def closure() -> torch.Tensor:
        loss = moved.square().sum()
        loss.backward()
        return loss

    start = moved.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(start.square().sum().item())
    assert not torch.equal(moved, start)
    assert torch.equal(left, before)
    assert left not in optimizer.state


def test_each_group_has_its_own_settings_and_steps():
    parameters = made()
    optimizer = te.optimizers.FusedAdam([{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:2]}], lr=1.0)
    before = [parameter.detach().clone() for parameter in parameters]
    step(optimizer, parameters, 1)
    assert torch.equal(parameters[0], before[0])
    assert not torch.equal(parameters[1], before[1])
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


@pytest.mark.parametrize("scale", [2.0, 1024.0])
def test_a_grad_scaler_unscales_and_an_infinite_gradient_changes_nothing(scale):
    parameters, others = made(), made()
    one, other = te.optimizers.FusedAdam(parameters), te.optimizers.FusedAdam(others)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for parameter, gradient in zip(parameters, normal(1), strict=True):
        parameter.grad = gradient * scaler.scale(torch.ones(()))
    scaler.step(one)
    scaler.update()
    step(other, others, 1)
    assert_same(parameters, others)
    saved = [parameter.detach().clone() for parameter in parameters]
    parameters[0].grad[0, 0] = math.inf
    scaler.step(one)
    assert_same(parameters, saved)
    assert one.param_groups[0]["step"] == 1


def test_chunks_change_nothing(monkeypatch):
    parameters, others = made(), made()
    one, other = te.optimizers.FusedAdam(parameters), te.optimizers.FusedAdam(others)
    step(other, others, 1)
    monkeypatch.setattr("te_hal.optimizers.parameters._CPU_CHUNK", 4)
    step(one, parameters, 1)
    assert_same(parameters, others)


# Refusals

ARGUMENTS = {
    "amsgrad": ({"amsgrad": True}, UnsupportedError),
    "capturable": ({"capturable": True}, UnsupportedError),
    "set_grad_none": ({"set_grad_none": True}, UnsupportedError),
    "lr": ({"lr": -1.0}, ArgumentError),
    "lr of NaN": ({"lr": math.nan}, ArgumentError),
    "eps": ({"eps": "small"}, ArgumentError),
    "weight_decay": ({"weight_decay": True}, ArgumentError),
    "betas": ({"betas": (0.9, 1.0)}, ArgumentError),
    "betas, one": ({"betas": (0.9,)}, ArgumentError),
    "bias_correction": ({"bias_correction": 1}, ArgumentError),
    "adam_w_mode": ({"adam_w_mode": "yes"}, ArgumentError),
    "exp_avg_dtype": ({"exp_avg_dtype": torch.float8_e4m3fn}, ArgumentError),
    "exp_avg_sq_dtype": ({"exp_avg_sq_dtype": torch.int8}, ArgumentError),
    "master_weight_dtype": ({"master_weight_dtype": torch.bfloat16}, ArgumentError),
    "store_param_remainders": ({"store_param_remainders": True}, ArgumentError),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_bad_argument_is_refused_by_name(name):
    arguments, error = ARGUMENTS[name]
    with pytest.raises(error, match=f"FusedAdam: {next(iter(arguments))}: got"):
        te.optimizers.FusedAdam(made(), **arguments)


def test_a_parameter_of_another_dtype_is_refused_and_no_group_is_added():
    optimizer = te.optimizers.FusedAdam(made())
    with pytest.raises(ArgumentError, match=r"got a parameter of torch\.float64"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_and_a_grad_scaler_are_refused():
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = te.optimizers.FusedAdam([parameter])
    parameter.grad = torch.zeros(4, 2).to_sparse()
    with pytest.raises(ArgumentError, match="a sparse gradient"):
        optimizer.step()
    with pytest.raises(UnsupportedError, match=r"FusedAdam\.step: grad_scaler"):
        optimizer.step(grad_scaler=torch.amp.GradScaler("cpu"))
    assert "step" not in optimizer.param_groups[0]


def test_states_are_asked_for_by_name():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = te.optimizers.FusedAdam([parameter], master_weights=True)
    with pytest.raises(UnknownNameError, match="before the first step"):
        optimizer.get_unscaled_state(parameter, "exp_avg")
    with pytest.raises(UnknownNameError, match="'momentum'"):
        optimizer.set_scaled_state(parameter, "momentum", torch.zeros(4))
    optimizer.initialize_state(parameter)
    assert optimizer.get_unscaled_state(parameter, "exp_avg").tolist() == [0.0] * 4
    with pytest.raises(ArgumentError, match="store_param_remainders"):
        optimizer.initialize_state(parameter, store_param_remainders=True)


def test_a_master_that_is_handed_over_is_where_the_first_step_starts():
    parameter = torch.nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    optimizer = te.optimizers.FusedAdam([parameter], lr=0.0, master_weights=True)
    optimizer.set_scaled_state(parameter, "master_param", torch.full((4,), 1.25))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter.tolist() == [1.25] * 4
