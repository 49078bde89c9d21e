"""Every module made on the meta device gets, later and elsewhere, the values it would have been made with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import te_hal.modules as te

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **given: te.Linear(16, 16, **given),
    "LayerNorm": lambda **given: te.LayerNorm(16, **given),
    "RMSNorm": lambda **given: te.RMSNorm(16, zero_centered_gamma=True, **given),
    "LayerNormLinear": lambda **given: te.LayerNormLinear(16, 16, parameters_split={"a": 8, "b": 8}, **given),
    "LayerNormMLP": lambda **given: te.LayerNormMLP(16, 32, activation="swiglu", **given),
    "GroupedLinear": lambda **given: te.GroupedLinear(2, 16, 16, **given),
    "GroupedLinear, stacked": lambda **given: te.GroupedLinear(2, 16, 16, single_grouped_weight=True, **given),
    "MultiheadAttention": lambda **given: te.MultiheadAttention(
        16, 2, qk_norm_type="RMSNorm", softmax_type="learnable", input_layernorm=True, **given
    ),
    "MultiheadAttention, off by one": lambda **given: te.MultiheadAttention(16, 2, softmax_type="off-by-one", **given),
    "TransformerLayer": lambda **given: te.TransformerLayer(16, 32, 2, normalization="RMSNorm", **given),
    "a decoder": lambda **given: te.TransformerLayer(
        16, 32, 2, layer_type="decoder", output_layernorm=True, softmax_type="learnable", fuse_qkv_params=True, **given
    ),
    "ops.Linear": lambda **given: te.ops.Linear(16, 16, **given),
    "ops.BasicLinear": lambda **given: te.ops.BasicLinear(16, 16, **given),
    "ops.Bias": lambda **given: te.ops.Bias(16, **given),
    "ops.LayerNorm": lambda **given: te.ops.LayerNorm(16, **given),
    "ops.RMSNorm": lambda **given: te.ops.RMSNorm(16, **given),
    "ops.GroupedLinear": lambda **given: te.ops.GroupedLinear(2, 16, 16, **given),
}


@pytest.mark.parametrize("emptied", [True, False], ids=["to_empty first", "reset_parameters alone"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_made_on_meta_is_filled_elsewhere_as_if_it_was_made_there(name, emptied):
    torch.manual_seed(1)
    expected = MODULES[name]()
    later = MODULES[name](device="meta")
    assert all(parameter.is_meta for parameter in later.parameters())
    if emptied:
        later.to_empty(device="cpu")
        for tensor in (*later.parameters(), *later.buffers()):
            torch.nn.init.constant_(tensor, torch.nan)
    torch.manual_seed(1)
    for part in later.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    wanted = dict(expected.named_parameters()) | dict(expected.named_buffers())
    found = dict(later.named_parameters()) | dict(later.named_buffers())
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
