"""Dropout of attention: which probabilities go, what the rest become, and who draws."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te

FORMS = {"chosen": False, "written_out": True}
TOKENS = 32


def weights_of(module: te.DotProductAttention, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The probabilities that reached the values, ``[s, 1, s]``: the values are the unit vectors."""
    return module(query, key, torch.eye(TOKENS).view(TOKENS, 1, 1, TOKENS))


@pytest.fixture(params=FORMS.values(), ids=list(FORMS))
def module(request: pytest.FixtureRequest) -> te.DotProductAttention:
    made = te.DotProductAttention(1, (8, TOKENS), attention_dropout=0.25, attn_mask_type="no_mask")
    made.always_written_out = request.param
    return made


def test_a_share_is_dropped_and_the_rest_scaled_up(module):
    query, key = torch.randn(2, TOKENS, 1, 1, 8)
    found = weights_of(module, query, key)
    module.eval()
    whole = weights_of(module, query, key)
    kept = found != 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(found[kept], whole[kept] / 0.75)
    torch.testing.assert_close(whole.sum(-1), torch.ones(TOKENS, 1))


def test_gradients_go_through_what_stayed(module):
    query, key, value = (torch.randn(TOKENS, 1, 1, size, requires_grad=True) for size in (8, 8, TOKENS))
    torch.manual_seed(3)
    stayed = (weights_of(module, query, key) != 0).detach().view(TOKENS, TOKENS)
    torch.manual_seed(3)
    y = module(query, key, value)
    gy = torch.randn_like(y)
    found = torch.autograd.grad(y, (query, key, value), gy)
    doubles = [tensor.detach().double().view(TOKENS, -1).requires_grad_() for tensor in (query, key, value)]
    probabilities = torch.softmax(doubles[0] @ doubles[1].t() * 8**-0.5, -1) * stayed / 0.75
    expected = torch.autograd.grad(probabilities @ doubles[2], doubles, gy.double().view(TOKENS, -1))
    # fp32: a few roundings of 6e-8 each, next to values near 0.
    for gradient, target in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.view(TOKENS, -1).double(), target, rtol=1e-4, atol=1e-5)


def test_dropout_under_the_tracker_repeats_its_stream_and_leaves_the_outside_alone():
    tracker = te.RNGStatesTracker()
    module = te.DotProductAttention(1, (8, TOKENS), attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    query, key = torch.randn(2, TOKENS, 1, 1, 8)
    for form in FORMS.values():
        module.always_written_out = form
        drawn = []
        for _ in range(2):
            tracker.reset()
            tracker.add("model-parallel-rng", 11)
            drawn.append([weights_of(module, query, key) for _ in range(2)])
            torch.rand(5)
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert torch.equal(drawn[0][1], drawn[1][1])
        assert not torch.equal(drawn[0][0], drawn[0][1])
        torch.manual_seed(1)
        weights_of(module, query, key)
        after = torch.rand(3)
        torch.manual_seed(1)
        assert torch.equal(after, torch.rand(3))


def test_without_dropout_the_tracker_is_not_asked():
    module = te.DotProductAttention(1, 8, attention_dropout=0.5, get_rng_state_tracker=lambda: pytest.fail("asked"))
    module.eval()(*torch.randn(3, 4, 1, 1, 8))


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5, float("nan"), "0.1", True, None], ids=repr)
def test_a_share_outside_zero_to_one_is_refused(dropout):
    with pytest.raises(ValueError, match=r"attention_dropout: got .*at least 0, below 1"):
        te.DotProductAttention(1, 8, attention_dropout=dropout)
