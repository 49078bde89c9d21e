"""set_deterministic: what is chosen under it, and the same bytes twice."""

from __future__ import annotations

import pytest
import torch

import te_hal
import te_hal.modules as te
from te_hal import recipe


def chosen(device: str) -> te_hal.modules.attention.choice.Choice:
    made = torch.zeros(4, 1, 2, 8, device=device)
    with te_hal.use_backend("null" if device == "meta" else "cpu_reference"):
        return MODULE.choice(made, made, made)


MODULE = te.DotProductAttention(2, 8)


def test_on_a_device_attention_is_written_out_and_says_why():
    assert chosen("meta").implementation == "torch"
    te_hal.set_deterministic(True)
    assert chosen("meta").implementation == "written_out"
    assert "set_deterministic is on" in chosen("meta").reason
    te_hal.set_deterministic(False)
    assert chosen("meta").implementation == "torch"


def test_on_the_cpu_torchs_kernels_stay():
    te_hal.set_deterministic(True)
    assert chosen("cpu").implementation == "torch"


def test_a_training_with_dropout_gives_the_same_bytes_twice():
    te_hal.set_deterministic(True)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = te.TransformerLayer(32, 64, 4)
        for _ in range(2):
            with te.autocast(recipe=recipe.DelayedScaling()):
                y = layer(torch.randn(8, 4, 32))
            y.square().sum().backward()
        found.append([y, *(parameter.grad for parameter in layer.parameters())])
    assert all(map(torch.equal, *found))


def test_reset_turns_it_off():
    te_hal.set_deterministic(True)
    te_hal.reset()
    assert chosen("meta").implementation == "torch"


def test_what_is_no_bool_is_refused():
    with pytest.raises(ValueError, match=r"te_hal\.set_deterministic: enabled: got 1"):
        te_hal.set_deterministic(1)
