"""A mask tensor under a mask type that has none: callers written for Transformer Engine pass the causal one along."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import ArgumentError

S, B, H, D = 6, 2, 2, 8
CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)
WIDER = CAUSAL.clone()
WIDER[3, 1] = True
WINDOW = CAUSAL | torch.ones(S, S, dtype=torch.bool).tril(-3)


def operands():
    torch.manual_seed(0)
    return tuple(torch.randn(S, B, H, D) for _ in range(3))


def attention(**given):
    return te.DotProductAttention(H, D, attention_dropout=0.0, **given)


TAKEN = {
    "causal": ({}, CAUSAL),
    "causal of all sequences": ({}, CAUSAL.expand(B, 1, S, S)),
    "less than causal": ({}, torch.zeros(1, 1, S, S, dtype=torch.bool)),
    "bottom right": ({"attn_mask_type": "causal_bottom_right"}, CAUSAL),
    "window": ({"window_size": (2, 0)}, WINDOW),
    "nothing": ({"attn_mask_type": "no_mask"}, torch.zeros(S, S, dtype=torch.bool)),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_mask_that_hides_nothing_more_changes_nothing(case):
    arguments, mask = TAKEN[case]
    module = attention(**arguments)
    assert torch.equal(module(*operands(), attention_mask=mask), module(*operands()))


REFUSED = {
    "one place more": ({}, WIDER),
    "a window that the module has not": ({}, WINDOW),
    "causal under no_mask": ({"attn_mask_type": "no_mask"}, CAUSAL),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mask_that_hides_more_is_refused(case):
    arguments, mask = REFUSED[case]
    with pytest.raises(ArgumentError, match="that hides more; accepted: None, or a mask that hides nothing but what"):
        attention(**arguments)(*operands(), attention_mask=mask)


@pytest.mark.parametrize("mask", [CAUSAL.float(), CAUSAL[:4]], ids=["floats", "shape"])
def test_what_is_no_mask_is_refused(mask):
    with pytest.raises(ArgumentError, match=r"attention_mask: got .*accepted: bool, broadcasts to \(2, 2, 6, 6\)"):
        attention()(*operands(), attention_mask=mask)


def test_a_mask_is_looked_at_again_after_it_was_written_to_and_under_another_window():
    mask, module = CAUSAL.clone(), attention()
    module(*operands(), attention_mask=mask)
    with pytest.raises(ArgumentError, match="hides more"):
        attention(attn_mask_type="no_mask")(*operands(), attention_mask=mask)
    mask[3, 1] = True
    with pytest.raises(ArgumentError, match="hides more"):
        module(*operands(), attention_mask=mask)


def test_a_mask_made_in_inference_mode_is_taken():
    with torch.inference_mode():
        mask = CAUSAL.clone()
        assert torch.equal(attention()(*operands(), attention_mask=mask), attention()(*operands()))


def test_a_transformer_layer_takes_the_causal_mask_along():
    layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(S, B, 32)
    assert torch.equal(layer(x, attention_mask=CAUSAL), layer(x))
