"""Every module under every recipe: saving what was loaded gives the same bytes, and training goes on exactly."""

from __future__ import annotations

import io

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories


def delayed_inputs(role: te.QuantizerRole | None) -> object:
    """State for some slots, two quantizers in others."""
    if role is not None and role.tensor_type == "input":
        return te.DelayedScalingRequest(amax_history_len=4)
    if role is not None and role.tensor_type == "grad_output":
        return te.IdentityQuantizer()
    return quantizer_factories.current_scaling_factory(role)


RECIPES = {
    "none": lambda: None,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "mtfp8": recipe.MTFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "custom": lambda: recipe.CustomRecipe(qfactory=delayed_inputs),
}

MODULES = {
    "Linear": lambda: te.Linear(32, 64),
    "LayerNorm": lambda: te.LayerNorm(32),
    "RMSNorm": lambda: te.RMSNorm(32),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 64),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, activation="swiglu", normalization="RMSNorm"),
    "MultiheadAttention": lambda: te.MultiheadAttention(32, 2, attention_dropout=0.0, input_layernorm=True),
    "TransformerLayer": lambda: te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0),
    "GroupedLinear": lambda: te.GroupedLinear(2, 32, 64),
}

CASES = pytest.mark.parametrize(("name", "chosen"), [(name, chosen) for name in MODULES for chosen in RECIPES])


def step(module: torch.nn.Module, chosen: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = 64 if isinstance(module, te.GroupedLinear) else 32
    x = torch.randn(rows, 1, 32, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    of = RECIPES[chosen]()
    splits = ([32, 32],) if rows == 64 else ()
    torch.manual_seed(seed)  # of stochastic rounding
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=chosen == "nvfp4"),
        te.autocast(enabled=of is not None, recipe=of),
    ):
        y = module(x, *splits)
    y.square().sum().backward()
    return y.detach(), x.grad


def saved(module: torch.nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    return buffer.getvalue()


@CASES
def test_saving_what_was_loaded_gives_the_same_bytes_and_goes_on_exactly(name, chosen):
    torch.manual_seed(0)
    module, other = MODULES[name](), MODULES[name]()
    for seed in range(2):
        step(module, chosen, seed)
    first = saved(module)
    other.load_state_dict(torch.load(io.BytesIO(first), weights_only=True), strict=True)
    assert saved(other) == first
    assert all(map(torch.equal, step(module, chosen, 7), step(other, chosen, 7)))
    assert saved(other) == saved(module)


@CASES
def test_what_is_saved_keeps_its_size_over_steps(name, chosen):
    module, sizes = MODULES[name](), set()
    for seed in range(6):  # more than the history is long
        step(module, chosen, seed)
        sizes.add(len(saved(module)))
    assert len(sizes) == 1
