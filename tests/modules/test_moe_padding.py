"""Fp8Padding and Fp8Unpadding, and the way through them and GroupedLinear."""

from __future__ import annotations

import pytest
import torch
from grouped_layers import INS, RECIPES, autocast, data, grouped

import te_hal.modules as te
from te_hal import recipe

SPLITS = [[3, 0, 17, 1], [16, 32, 0, 16], [0, 0, 0, 0], [0, 0, 5, 0]]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("align", [1, 16, 32])
def test_padding_puts_zeros_behind_each_group_and_unpadding_strips_them(splits, align):
    x = torch.randn(sum(splits), INS).requires_grad_()
    pads, strips = te.Fp8Padding(4, align), te.Fp8Unpadding(4, align)
    padded, sizes = pads(x, splits)
    assert sizes == [-(-size // align) * align for size in splits]
    expected = []
    for part, size in zip(x.split(splits), sizes, strict=True):
        expected += [part, x.new_zeros(size - len(part), INS)]
    assert torch.equal(padded, torch.cat(expected))
    assert torch.equal(strips(padded, splits), x)
    weights = torch.randn(padded.shape)
    (gradient,) = torch.autograd.grad((padded * weights).sum(), x, retain_graph=True)
    assert torch.equal(gradient, strips(weights, splits))
    (back,) = torch.autograd.grad((strips(padded, splits) * gradient).sum(), padded)
    assert torch.equal(back, pads(gradient, splits)[0])


def test_nothing_is_copied_where_nothing_is_missing():
    x = torch.randn(64, INS)
    padded, sizes = te.Fp8Padding(4)(x, [16, 32, 0, 16])
    assert padded is x
    assert sizes == [16, 32, 0, 16]
    assert te.Fp8Unpadding(4)(x, torch.tensor([16, 32, 0, 16])) is x


@pytest.mark.parametrize(
    ("chosen", "multiple"),
    [
        (None, 16),
        (recipe.DelayedScaling, 16),
        (recipe.Float8BlockScaling, 16),
        (recipe.MXFP8BlockScaling, 32),
        (recipe.NVFP4BlockScaling, 128),
        (lambda: recipe.CustomRecipe(qfactory=lambda _: te.IdentityQuantizer()), 128),
        (lambda: recipe.CustomRecipe(qfactory=lambda _: te.IdentityQuantizer(), quantization_alignment=24), 24),
    ],
    ids=["none", "delayed", "block", "mxfp8", "nvfp4", "custom", "custom_24"],
)
def test_the_multiple_is_that_of_the_recipe_in_force_at_each_call(chosen, multiple):
    pads = te.Fp8Padding(1)
    pads(torch.zeros(1, INS), [1])  # under another recipe
    with te.autocast(enabled=chosen is not None, recipe=None if chosen is None else chosen()):
        assert pads(torch.zeros(1, INS), [1])[1] == [multiple]


@pytest.mark.parametrize("name", RECIPES)
def test_padded_rows_change_neither_results_nor_gradients_nor_scales(name):
    module, other, splits = grouped(bias=False), grouped(bias=False), [33, 0, 70, 25]
    x, gy = data(sum(splits))
    parts, grads, longer, larger = [], [], [], [64, 0, 96, 32]
    for part, grad, size in zip(x.split(splits), gy.split(splits), larger, strict=True):
        parts.append(torch.nn.functional.pad(part, (0, 0, 0, size - len(part))))
        grads.append(torch.nn.functional.pad(grad, (0, 0, 0, size - len(part))))
        longer.append(size)
    pads, strips = te.Fp8Padding(4, 32), te.Fp8Unpadding(4, 32)
    x.requires_grad_()
    with autocast(name):
        padded, sizes = pads(x, splits)
        y = strips(module(padded, sizes), splits)
    y.backward(gy)
    assert sizes == longer
    whole = torch.cat(parts).requires_grad_()
    with autocast(name):
        expected = other(whole, longer)
    expected.backward(torch.cat(grads))
    assert torch.equal(y, strips(expected, splits))
    assert torch.equal(x.grad, strips(whole.grad, splits))
    assert all(
        torch.equal(one.grad, two.grad) for one, two in zip(module.parameters(), other.parameters(), strict=True)
    )
    if name == "delayed":
        assert module.fp8_meta["scaling_fwd"].amax_history[-1, 0] == x[:33].abs().max()


@pytest.mark.parametrize(
    ("kind", "splits", "message"),
    [
        (te.Fp8Padding, [8, 8], "got 16 rows in all, for an input of 12"),
        (te.Fp8Padding, [4, 4], r"got \[4, 4\]: 8 rows; accepted: the 12 rows"),
        (te.Fp8Padding, [12], "got 1 sizes; accepted: 2"),
        (te.Fp8Padding, [13, -1], "got -1 at 1"),
        (te.Fp8Unpadding, [3, 8], r"got \[3, 8\]: 32 rows when padded to multiples of 16"),
    ],
    ids=["more", "fewer", "number", "negative", "unpadding"],
)
def test_sizes_that_do_not_fit_the_rows_are_refused(kind, splits, message):
    with pytest.raises(ValueError, match=f"{kind.__name__}: m_splits: {message}"):
        kind(2)(torch.zeros(12, INS), splits)


@pytest.mark.parametrize("arguments", [{"num_gemms": 0}, {"num_gemms": 2, "align_size": 0}], ids=str)
def test_the_constructor_refuses_what_cannot_be(arguments):
    with pytest.raises(ValueError, match=r"Fp8Padding: .*got 0; accepted: a positive int"):
        te.Fp8Padding(**arguments)
