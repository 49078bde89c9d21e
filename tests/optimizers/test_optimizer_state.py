"""State dicts of the optimizers: exact to the bit, handed over to and from torch.optim, refused before any change."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import ArgumentError, CheckpointError

ADAM = {
    "fp32": {},
    "bf16 moments": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16 moments": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "8-bit moments": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "masters": {"master_weights": True},
    "fp16 masters": {"master_weights": True, "master_weight_dtype": torch.float16},
    "remainders": {"master_weights": True, "store_param_remainders": True},
}


def made(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(4, 6), (3,)]]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for seed in steps:
        generator = torch.Generator().manual_seed(100 + seed)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def make(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return te.optimizers.FusedSGD(parameters, 0.1, momentum=0.9, master_weights=True)
    return te.optimizers.FusedAdam(parameters, lr=1e-2, weight_decay=0.1, **ADAM[name])


def saved_file(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def bits(value: object) -> object:
    """Everything in it, tensors as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", [*ADAM, "sgd"])
def test_training_goes_on_from_a_file_bit_for_bit(name):
    straight, resumed = made(), made()
    one = make(name, straight)
    train(one, range(3))
    saved = saved_file({"optimizer": one.state_dict(), "parameters": [p.detach() for p in straight]})
    train(one, range(3, 6))

    loaded = torch.load(saved, weights_only=True)
    other = make(name, resumed)
    train(other, range(9, 10))
    with torch.no_grad():
        for parameter, value in zip(resumed, loaded["parameters"], strict=True):
            parameter.copy_(value)
    other.load_state_dict(loaded["optimizer"])
    assert bits(other.state_dict()) == bits(loaded["optimizer"])
    train(other, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed, strict=True))
    for p, q in zip(straight, resumed, strict=True):
        assert one.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(one.state[p][key], other.state[q][key]) for key in one.state[p])


def test_a_loaded_state_shares_nothing_with_what_it_came_from():
    parameters = made()
    optimizer = make("masters", parameters)
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = make("masters", made())
    other.load_state_dict(saved)
    train(other, range(2, 4))
    assert all(torch.equal(saved["state"][0][key], kept["state"][0][key]) for key in kept["state"][0])


@pytest.mark.parametrize(
    ("reference", "settings"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_a_run_moves_from_torch_to_here_and_back(reference, settings):
    def ours(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if reference is torch.optim.SGD:
            return te.optimizers.FusedSGD(parameters, 1e-2, **settings)
        decoupled = reference is torch.optim.AdamW
        return te.optimizers.FusedAdam(parameters, 1e-2, adam_w_mode=decoupled, **settings)

    straight, moved = made(torch.float32), made(torch.float32)
    expected, first = reference(straight, 1e-2, **settings), reference(moved, 1e-2, **settings)
    train(expected, range(6))
    train(first, range(2))
    second = ours(moved)
    second.load_state_dict(first.state_dict())
    train(second, range(2, 4))
    third = reference(moved, 1e-2, **settings)
    third.load_state_dict(second.state_dict())
    train(third, range(4, 6))
    for p, q in zip(straight, moved, strict=True):
        # The same formulas in fp32, rounded in another order.
        assert (p - q).norm() <= 1e-6 * p.norm()


def test_fp32_states_of_transformer_engine_are_encoded_as_they_are_kept_here():
    plain, parameters = made(), made()
    source, target = make("fp32", plain), make("8-bit moments", parameters)
    train(source, range(2))
    saved = source.state_dict()
    for entry in saved["state"].values():
        del entry["step"]  # there it stands in the group only
    target.load_state_dict(saved)
    assert target.param_groups[0]["step"] == 2
    for p, q in zip(plain, parameters, strict=True):
        expected, found = source.state[p]["exp_avg"], target.get_unscaled_state(q, "exp_avg")
        assert target.state[q]["exp_avg"].dtype == torch.uint8
        # E4M3 rounds by up to 1/16, by 0.03 in norm.
        assert (found - expected).norm() <= 0.05 * expected.norm()


def with_entry(saved: dict, **entries: object) -> dict:
    saved["state"][0] = {**saved["state"][0], **entries}
    return saved


def with_group(saved: dict, **settings: object) -> dict:
    saved["param_groups"][0] = {**saved["param_groups"][0], **settings}
    return saved


BAD = {
    "a state nobody has": (lambda saved: with_entry(saved, max_exp_avg_sq=torch.zeros(4, 6)), CheckpointError),
    "another shape": (lambda saved: with_entry(saved, exp_avg=torch.zeros(6, 4)), CheckpointError),
    "no tensor": (lambda saved: with_entry(saved, exp_avg=1.0), CheckpointError),
    "whole numbers": (lambda saved: with_entry(saved, exp_avg=torch.zeros(4, 6, dtype=torch.int64)), CheckpointError),
    "8 bits without a scale": (
        lambda saved: with_entry(saved, exp_avg=torch.zeros(4, 6, dtype=torch.uint8)),
        CheckpointError,
    ),
    "a scale for fp32": (lambda saved: with_entry(saved, exp_avg_scale_inv=torch.ones(1)), CheckpointError),
    "remainders without their use": (
        lambda saved: with_entry(saved, master_param=torch.zeros(4, 6, dtype=torch.int16)),
        CheckpointError,
    ),
    "two numbers of steps": (lambda saved: with_entry(saved, step=torch.tensor(7.0)), CheckpointError),
    "amsgrad": (lambda saved: with_group(saved, amsgrad=True), ArgumentError),
    "maximize": (lambda saved: with_group(saved, maximize=True), ArgumentError),
    "weight decay in the gradient": (lambda saved: with_group(saved, decoupled_weight_decay=False), ArgumentError),
    "a bad lr": (lambda saved: with_group(saved, lr=float("nan")), ArgumentError),
    "another number of groups": (lambda saved: {**saved, "param_groups": saved["param_groups"] * 2}, ValueError),
}


@pytest.mark.parametrize("name", BAD)
def test_a_state_that_does_not_fit_is_refused_and_the_old_one_stays(name):
    change, error = BAD[name]
    parameters = made()
    optimizer = make("masters", parameters)
    train(optimizer, range(2))
    before = bits(optimizer.state_dict())
    with pytest.raises(error):
        optimizer.load_state_dict(change(copy.deepcopy(optimizer.state_dict())))
    assert bits(optimizer.state_dict()) == before


def test_masters_are_refused_where_none_are_kept():
    source, target = make("masters", made()), make("fp32", made())
    train(source, range(1))
    with pytest.raises(CheckpointError, match="parameter 0 with master_param"):
        target.load_state_dict(source.state_dict())


def test_the_state_does_not_grow_over_steps():
    for name in ADAM:
        optimizer = make(name, made())
        sizes = set()
        for number in range(3):
            train(optimizer, range(number, number + 1))
            sizes.add(sum(t.nbytes for entry in optimizer.state.values() for t in entry.values()))
        assert len(sizes) == 1, name
