"""Scaling state in a module that is cast, moved, copied, pickled, or first run in inference mode."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch

import te_hal
import te_hal.modules as te
from te_hal.recipe import DelayedScaling


def trained() -> te.Linear:
    torch.manual_seed(3)
    module = te.Linear(16, 16)
    step(module)
    return module


def step(module: te.Linear, scale: float = 1.0) -> None:
    torch.manual_seed(5)
    module.zero_grad()
    x = torch.randn(8, 16, dtype=module.weight.dtype) * scale
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        module(x).square().sum().backward()


def values(module: te.Linear) -> list[torch.Tensor]:
    return [
        getattr(module.fp8_meta[key], name).clone()
        for key in ("scaling_fwd", "scaling_bwd")
        for name in ("scale", "amax_history")
    ]


CASTS = {
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "float": lambda module: module.bfloat16().float(),
    "double": lambda module: module.double(),
    "to dtype": lambda module: module.to(torch.bfloat16),
    "to device": lambda module: module.to("cpu"),
    "in a container": lambda module: torch.nn.Sequential(module).bfloat16()[0],
}


@pytest.mark.parametrize("cast", CASTS)
def test_casts_and_moves_keep_the_state_in_fp32(cast):
    module = trained()
    before = values(module)
    moved = CASTS[cast](module)
    for old, new in zip(before, values(moved), strict=True):
        assert new.dtype == torch.float32
        assert torch.equal(old, new)
    if moved.weight.dtype != torch.float64:
        step(moved, 64.0)
        history = moved.fp8_meta["scaling_fwd"].amax_history
        assert history[-2, 0] == before[1][-1, 0]
        assert history[-1, 0] > 32 * before[1][-1, 0]


def saved_whole(module: te.Linear) -> te.Linear:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


REMAKES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_whole,
    "deepcopy of a container": lambda module: copy.deepcopy(torch.nn.Sequential(module))[0],
}


@pytest.mark.parametrize("remake", REMAKES)
def test_a_copied_module_goes_on_by_itself_as_the_original_does(remake):
    original = trained()
    copied = REMAKES[remake](original)
    before = values(original)
    step(copied, 8.0)
    assert all(torch.equal(old, new) for old, new in zip(before, values(original), strict=True))
    step(original, 8.0)
    for one, other in zip(values(original), values(copied), strict=True):
        assert torch.equal(one, other)
    assert values(copied)[1][-1, 0] > values(copied)[1][-2, 0] > 0
    assert torch.equal(original.weight.grad, copied.weight.grad)


@pytest.mark.parametrize("remake", REMAKES)
def test_a_copy_of_a_module_that_never_ran_runs(remake):
    step(REMAKES[remake](te.Linear(16, 16)))


def test_state_made_in_inference_mode_trains_afterwards():
    module = te.Linear(16, 16)
    chosen = DelayedScaling(amax_history_len=4)
    with torch.inference_mode(), te.autocast(recipe=chosen):
        module(torch.full((8, 16), 5.0))
    with torch.inference_mode(), te.autocast(recipe=DelayedScaling(amax_history_len=6, margin=1)):
        module(torch.full((8, 16), 7.0))
    step(module)
    with torch.inference_mode(), te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        module(torch.ones(8, 16))
    step(module)
    assert module.fp8_meta["scaling_fwd"].amax_history[-2, 0].item() == 7.0


def test_a_module_that_is_gone_takes_its_state_along():
    module = te.Linear(16, 16)
    with te.autocast(recipe=DelayedScaling()):
        module(torch.ones(8, 16))
        del module
        gc.collect()


def test_a_run_on_the_meta_device_leaves_nothing_to_save_and_starts_anew_elsewhere():
    module = te.Linear(16, 16, device="meta")
    chosen = DelayedScaling(amax_history_len=4)
    with te_hal.use_backend("null"), te.autocast(recipe=chosen):
        module(torch.empty(8, 16, device="meta")).sum().backward()
    assert module.state_dict()["_extra_state"].numel() == 0
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    with te.autocast(recipe=chosen):
        module(torch.full((8, 16), 2.0))
    assert module.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0]
