"""load_state_dict of something that no such optimizer saved: refused whole, with what it is."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import CheckpointError

KINDS = {"FusedAdam": te.optimizers.FusedAdam, "FusedSGD": lambda ps: te.optimizers.FusedSGD(ps, 0.1, momentum=0.9)}
OTHERS = {
    "FusedAdam": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "FusedSGD": lambda ps: torch.optim.AdamW(ps, lr=0.1),
}
GROUP = {
    "FusedAdam": {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]},
    "FusedSGD": {"lr": 0.5, "momentum": 0.0, "dampening": 0, "weight_decay": 0.0, "nesterov": False, "params": [0]},
}
NO_STATE_DICT = {
    "None": (None, "a NoneType"),
    "a list": ([], "a list"),
    "other keys": ({"a": 1}, "a dict with 'a'"),
    "empty": ({}, "no keys"),
    "no state": ({"param_groups": []}, "'param_groups'"),
    "no groups": ({"state": {}, "param_groups": None}, "'state', 'param_groups'"),
    "a group of nothing": ({"state": {}, "param_groups": [3]}, "group 0 without 'params'"),
    "a group without parameters": ({"state": {}, "param_groups": [{"lr": 1.0}]}, "group 0 without 'params'"),
    "a state of nothing": ({"state": {0: 3}, "param_groups": []}, "a state that is no dict"),
}


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def facts(optimizer: torch.optim.Optimizer) -> object:
    saved = optimizer.state_dict()
    states = {i: {k: v.tolist() for k, v in entry.items()} for i, entry in saved["state"].items()}
    return states, saved["param_groups"]


def refused(kind: str, state_dict: object) -> str:
    optimizer = stepped(KINDS[kind]([torch.nn.Parameter(torch.ones(3))]))
    before = facts(optimizer)
    with pytest.raises(CheckpointError, match=rf"^{kind}\.load_state_dict: got .*; accepted: ") as raised:
        optimizer.load_state_dict(state_dict)
    assert facts(optimizer) == before
    return raised.value.got


@pytest.mark.parametrize("case", NO_STATE_DICT)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_state_dict_is_refused_and_nothing_has_changed(kind, case):
    state_dict, got = NO_STATE_DICT[case]
    assert got in refused(kind, state_dict)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_another_kinds_state_is_refused_whether_or_not_it_has_stepped(kind, steps):
    other = OTHERS[kind]([torch.nn.Parameter(torch.ones(3))])
    if steps:
        stepped(other)
    missing = {"FusedAdam": "without betas, eps", "FusedSGD": "without momentum, dampening, nesterov"}
    assert missing[kind] in refused(kind, other.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_no_number_is_refused(kind):
    assert "step 'x'" in refused(kind, {"state": {}, "param_groups": [{**GROUP[kind], "step": "x"}]})


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_kinds_groups_are_taken_with_settings_of_the_users(kind):
    optimizer = KINDS[kind]([torch.nn.Parameter(torch.ones(3))])
    optimizer.load_state_dict({"state": {}, "param_groups": [{**GROUP[kind], "initial_lr": 0.5, "name": "head"}]})
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["name"]) == (0.5, "head")
