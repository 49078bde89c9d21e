"""Sliding windows with every mask, both alignments of the diagonal, and lengths in the place of a padding mask."""

from __future__ import annotations

import itertools

import attention_by_hand as by_hand
import pytest
import torch

import te_hal.modules as te

B, H, D = 2, 4, 8
SCALE = D**-0.5
#: A few roundings of fp32 in sums of up to 8 products.
BOUND = 2e-6
WINDOWS = [(-1, -1), (2, 0), (1, 2), (0, 0), (-1, 1)]
#: Queries and keys, the heads of keys, and the format: each once with every mask and window.
SHAPES = {"square": (5, 5, 2, "sbhd"), "more keys": (4, 7, 1, "bshd"), "more queries": (6, 4, 4, "sbhd")}
#: Tokens of queries and keys of each sequence.
LENGTHS = {"square": ((5, 3), (5, 3)), "more keys": ((4, 2), (6, 7)), "more queries": ((6, 5), (4, 2))}


def operands(shape: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    queries, keys, groups, qkv_format = SHAPES[shape]
    both = [(queries, H), (keys, groups), (keys, groups)]
    sizes = [((length, B) if qkv_format == "sbhd" else (B, length)) + (heads, D) for length, heads in both]
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]
    return inputs, torch.randn(*sizes[0][:2], H * D)


def padding(shape: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for length, tokens in zip(SHAPES[shape][:2], LENGTHS[shape], strict=True):
        mask = torch.ones(B, 1, 1, length, dtype=torch.bool)
        for row, count in enumerate(tokens):
            mask[row, ..., :count] = False
        found.append(mask)
    return found[0], found[1]


def mask_of(mask_type: str, shape: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    queries, keys = SHAPES[shape][:2]
    if mask_type == "arbitrary":
        return torch.rand(B, 1, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.3
    return padding(shape) if mask_type.startswith("padding") else None


def check(
    found: torch.Tensor, inputs: list[torch.Tensor], gy: torch.Tensor, seen: torch.Tensor, qkv_format: str
) -> None:
    """Output and gradients against float64."""
    gradients = torch.autograd.grad(found, inputs, gy)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    first = [by_hand.heads_first(tensor, qkv_format) for tensor in doubles]
    output = by_hand.merged(by_hand.attend(*first, seen, SCALE), qkv_format)
    expected = [output, *torch.autograd.grad(output, doubles, gy.double())]
    for value, target in zip([found, *gradients], expected, strict=True):
        assert value.isfinite().all()
        # A query that sees one key has no gradient but roundings of the output's.
        assert (value.double() - target).norm() <= BOUND * max(gy.norm(), target.norm())


CASES = [
    case
    for case in itertools.product(by_hand.CAUSAL, WINDOWS, SHAPES)
    if case[0] != "padding_causal" or case[1] != (1, 2)  # what a window says right of a causal mask is tested below
]


@pytest.mark.parametrize(("mask_type", "window", "shape"), CASES, ids=lambda value: str(value).replace(" ", "_"))
def test_a_window_joins_every_mask(mask_type, window, shape):
    queries, keys, groups, qkv_format = SHAPES[shape]
    module = te.DotProductAttention(H, D, groups, qkv_format=qkv_format, attn_mask_type=mask_type, window_size=window)
    inputs, gy = operands(shape)
    mask = mask_of(mask_type, shape)
    seen = by_hand.visible(mask_type, (B, H, queries, keys), mask, window)
    check(module(*inputs, attention_mask=mask), inputs, gy, seen, qkv_format)


GRID = list(itertools.product(by_hand.CAUSAL, WINDOWS, SHAPES, [1, 2, 4], ["sbhd", "bshd"]))


@pytest.mark.slow
@pytest.mark.parametrize("mask_type", by_hand.CAUSAL)
def test_every_mask_with_every_window_format_and_number_of_groups(mask_type):
    for name, window, shape, groups, qkv_format in GRID:
        if name != mask_type:
            continue
        queries, keys = SHAPES[shape][:2]
        for form in (False, True):
            module = te.DotProductAttention(
                H, D, groups, qkv_format=qkv_format, attn_mask_type=mask_type, window_size=window
            )
            module.always_written_out = form
            sizes = [(queries, H), (keys, groups), (keys, groups)]
            lead = [(n, B) if qkv_format == "sbhd" else (B, n) for n, _ in sizes]
            inputs = [
                torch.randn(*first, heads, D, requires_grad=True) for first, (_, heads) in zip(lead, sizes, strict=True)
            ]
            mask = mask_of(mask_type, shape)
            seen = by_hand.visible(mask_type, (B, H, queries, keys), mask, window)
            gy = torch.randn(*lead[0], H * D)
            check(module(*inputs, attention_mask=mask), inputs, gy, seen, qkv_format)


@pytest.mark.parametrize("bottom_right", [False, True], ids=["top_left", "bottom_right"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask_type", ["no_mask", "padding", "arbitrary"])
def test_where_a_window_lies_can_be_said_where_the_mask_leaves_it_open(mask_type, shape, bottom_right):
    queries, keys, groups, qkv_format = SHAPES[shape]
    arguments = {"qkv_format": qkv_format, "attn_mask_type": mask_type}
    standing = te.DotProductAttention(H, D, groups, bottom_right_diagonal=bottom_right, window_size=(1, 1), **arguments)
    called = te.DotProductAttention(H, D, groups, **arguments)
    inputs, gy = operands(shape)
    mask = mask_of(mask_type, shape)
    y = standing(*inputs, attention_mask=mask)
    seen = by_hand.visible(mask_type, (B, H, queries, keys), mask, (1, 1), bottom_right)
    check(y, inputs, gy, seen, qkv_format)
    for_once = called(*inputs, attention_mask=mask, window_size=(1, 1), bottom_right_diagonal=bottom_right)
    assert torch.equal(for_once, y)


@pytest.mark.parametrize("always_written_out", [False, True], ids=["chosen", "written_out"])
@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right", "no_mask"])
def test_both_forms_of_a_window_agree(mask_type, always_written_out):
    inputs, gy = operands("more keys")
    module = te.DotProductAttention(H, D, 1, qkv_format="bshd", attn_mask_type=mask_type, window_size=(2, 0))
    module.always_written_out = always_written_out
    seen = by_hand.visible(mask_type, (B, H, 4, 7), None, (2, 0))
    check(module(*inputs), inputs, gy, seen, "bshd")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_lengths_mean_what_the_padding_mask_of_these_lengths_means(mask_type, shape):
    groups, qkv_format = SHAPES[shape][2:]
    module = te.DotProductAttention(H, D, groups, qkv_format=qkv_format, attn_mask_type=mask_type, window_size=(2, 0))
    inputs, _ = operands(shape)
    of_queries, of_keys = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in LENGTHS[shape])
    assert torch.equal(
        module(*inputs, cu_seqlens_q=of_queries, cu_seqlens_kv=of_keys),
        module(*inputs, attention_mask=padding(shape)),
    )


def test_padding_in_front_moves_the_diagonal_with_its_tokens():
    mask = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    mask[..., :2] = True
    queries = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
    module = te.DotProductAttention(1, D, qkv_format="bshd", attn_mask_type="padding_causal_bottom_right")
    query, key = torch.randn(1, 3, 1, D), torch.randn(1, 5, 1, D)
    plain = te.DotProductAttention(1, D, qkv_format="bshd", attn_mask_type="causal")
    found = module(query, key, key, attention_mask=(queries, mask))
    torch.testing.assert_close(found, plain(query, key[:, 2:], key[:, 2:]))


def test_what_a_mask_hides_stays_hidden_in_a_window():
    mask = torch.tensor([False, True, False, False]).view(1, 1, 1, 4)
    module = te.DotProductAttention(1, 4, qkv_format="bshd", attn_mask_type="padding_causal", window_size=(2, 0))
    weights = module(torch.randn(1, 4, 1, 4), torch.randn(1, 4, 1, 4), torch.eye(4).view(1, 4, 1, 4), mask)
    assert not weights[..., 1].any()
    assert (weights[0, 3] != 0).tolist() == [False, False, True, True]


def test_a_causal_mask_hides_what_a_window_would_show_on_its_right():
    inputs, _ = operands("square")
    module = te.DotProductAttention(H, D, 2, attn_mask_type="causal")
    assert torch.equal(module(*inputs, window_size=(2, 3)), module(*inputs, window_size=(2, 0)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_size": (1,)}, r"window_size: got \(1,\); accepted: a pair"),
        ({"window_size": (-2, 0)}, r"window_size: got \(-2, 0\)"),
        ({"window_size": (True, 0)}, r"window_size: got \(True, 0\)"),
        ({"window_size": 4}, "window_size: got 4"),
        ({"attn_mask_type": "no_mask", "window_size": (-1, 0)}, r"window_size: got \(-1, 0\) under .*causal mask type"),
        ({"bottom_right_diagonal": True}, "bottom_right_diagonal: got True.*attn_mask_type='causal_bottom_right'"),
        (
            {"attn_mask_type": "padding_causal_bottom_right", "bottom_right_diagonal": False},
            "bottom_right_diagonal: got False.*choose attn_mask_type='padding_causal'",
        ),
        ({"attn_mask_type": "no_mask", "bottom_right_diagonal": 1}, "bottom_right_diagonal: got 1"),
    ],
    ids=str,
)
def test_a_window_or_diagonal_that_cannot_be_is_refused_by_constructor_and_call(arguments, message):
    with pytest.raises(ValueError, match=message):
        te.DotProductAttention(H, D, **arguments)
    inputs, _ = operands("square")
    with pytest.raises(ValueError, match=message):
        te.DotProductAttention(H, D, 2)(*inputs, **arguments)
