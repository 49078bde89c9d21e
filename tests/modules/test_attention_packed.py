"""Packed sequences, qkv_format="thd": each as if it were alone, whatever lies around it."""

from __future__ import annotations

import itertools

import attention_by_hand as by_hand
import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import TeHalError

H, D, DV = 4, 8, 6
SCALE = D**-0.5
BOUND = 2e-6
MASKS = ["padding", "padding_causal", "padding_causal_bottom_right"]
ALONE = {name: name.removeprefix("padding_") if "causal" in name else "no_mask" for name in MASKS}
#: Lengths of queries and of keys.
SEQUENCES = {
    "self": ([3, 1, 5], [3, 1, 5]),
    "more keys": ([2, 4, 1], [5, 4, 3]),
    "fewer keys": ([4, 3], [2, 3]),
    "an empty one": ([3, 0, 2], [3, 2, 0]),
    "none": ([], []),
}
#: Tokens that nobody owns before each sequence, and behind the last.
GAPS = {"gapless": 0, "with gaps": 2}


def cumulative(lengths: list[int], gap: int = 0) -> torch.Tensor:
    return torch.tensor([0, *(length + gap for length in lengths)]).cumsum(0).int()


def operands(lengths: tuple[list[int], list[int]], groups: int, gap: int) -> list[torch.Tensor]:
    """Queries, keys, values and the output's gradient; gaps hold NaN."""
    tokens = [sum(each) + gap * len(each) for each in lengths]
    sizes = [(tokens[0], H, D), (tokens[1], groups, D), (tokens[1], groups, DV)]
    found = [torch.randn(size) for size in sizes]
    for tensor, each in zip(found, (lengths[0], lengths[1], lengths[1]), strict=True):
        for start, length in zip(cumulative(each, gap).tolist(), each, strict=False):
            tensor[start + length : start + length + gap] = torch.nan
    return [*(tensor.requires_grad_() for tensor in found), torch.randn(tokens[0], H * DV)]


def one_by_one(
    inputs: list[torch.Tensor],
    gy: torch.Tensor,
    lengths: tuple[list[int], list[int]],
    gap: int,
    mask_type: str,
    window: tuple[int, int] = (-1, -1),
) -> list[torch.Tensor]:
    """Output and gradients in float64, sequence by sequence; 0 for what belongs to none."""
    outputs = [torch.zeros(gy.shape, dtype=torch.float64), *(torch.zeros_like(t, dtype=torch.float64) for t in inputs)]
    starts = [cumulative(each, gap).tolist() for each in lengths]
    for start, key_start, queries, keys in zip(*starts, *lengths, strict=False):
        parts = [slice(start, start + queries), *[slice(key_start, key_start + keys)] * 2]
        own = [t.detach()[part].double().requires_grad_() for t, part in zip(inputs, parts, strict=True)]
        first = [t.transpose(0, 1).unsqueeze(0) for t in own]
        seen = by_hand.visible(ALONE[mask_type], (1, H, queries, keys), None, window)
        y = by_hand.attend(*first, seen, SCALE)[0].transpose(0, 1).flatten(1)
        gradients = torch.autograd.grad(y, own, gy[parts[0]].double(), allow_unused=True) if y.numel() else [None] * 3
        for target, part, value in zip(outputs, [parts[0], *parts], [y, *gradients], strict=True):
            if value is not None:
                target[part] = value.detach()
    return outputs


def check(found: torch.Tensor, inputs: list[torch.Tensor], gy: torch.Tensor, expected: list[torch.Tensor]) -> None:
    gradients = torch.autograd.grad(found, inputs, gy)
    for value, target in zip([found, *gradients], expected, strict=True):
        assert value.isfinite().all()
        assert (value.double() - target).norm() <= BOUND * max(1.0, gy.norm(), target.norm())
        assert not value[target.flatten(1).eq(0).all(1)].any()


@pytest.mark.parametrize("form", [False, True], ids=["chosen", "written_out"])
@pytest.mark.parametrize("gap", GAPS.values(), ids=list(GAPS))
@pytest.mark.parametrize("case", SEQUENCES)
@pytest.mark.parametrize("mask_type", MASKS)
def test_each_sequence_attends_as_if_it_were_alone(mask_type, case, gap, form):
    lengths = SEQUENCES[case]
    module = te.DotProductAttention(H, (D, DV), 2, qkv_format="thd", attn_mask_type=mask_type)
    module.always_written_out = form
    *inputs, gy = operands(lengths, 2, gap)
    of_queries, of_keys = (cumulative(each, gap) for each in lengths)
    padded = {"cu_seqlens_q_padded": of_queries, "cu_seqlens_kv_padded": of_keys}
    y = module(
        *inputs,
        cu_seqlens_q=cumulative(lengths[0]),
        cu_seqlens_kv=cumulative(lengths[1]),
        **(padded if gap else {}),
    )
    check(y, inputs, gy, one_by_one(inputs, gy, lengths, gap, mask_type))


@pytest.mark.slow
@pytest.mark.parametrize("case", SEQUENCES)
@pytest.mark.parametrize("mask_type", MASKS)
def test_every_window_number_of_groups_and_gap_gives_each_sequence_its_own(mask_type, case):
    lengths = SEQUENCES[case]
    grid = itertools.product([(-1, -1), (2, 0), (1, 2), (0, 0), (-1, 1)], [1, 2, 4], GAPS.values(), [False, True])
    for window, groups, gap, form in grid:
        module = te.DotProductAttention(H, (D, DV), groups, qkv_format="thd", attn_mask_type=mask_type)
        module.always_written_out = form
        *inputs, gy = operands(lengths, groups, gap)
        sequences = {"cu_seqlens_q": cumulative(lengths[0]), "cu_seqlens_kv": cumulative(lengths[1])}
        if gap:
            of_queries, of_keys = (cumulative(each, gap) for each in lengths)
            sequences |= {"cu_seqlens_q_padded": of_queries, "cu_seqlens_kv_padded": of_keys}
        y = module(*inputs, window_size=window, **sequences)
        check(y, inputs, gy, one_by_one(inputs, gy, lengths, gap, mask_type, window))


@pytest.mark.parametrize("groups", [1, 4], ids="{} groups".format)
@pytest.mark.parametrize("case", ["self", "more keys", "an empty one"])
@pytest.mark.parametrize("mask_type", MASKS)
def test_windows_are_each_sequences_own(mask_type, case, groups):
    lengths = SEQUENCES[case]
    module = te.DotProductAttention(H, (D, DV), groups, qkv_format="thd", attn_mask_type=mask_type, window_size=(1, 1))
    *inputs, gy = operands(lengths, groups, 0)
    y = module(*inputs, cu_seqlens_q=cumulative(lengths[0]), cu_seqlens_kv=cumulative(lengths[1]))
    check(y, inputs, gy, one_by_one(inputs, gy, lengths, 0, mask_type, (1, 1)))


@pytest.mark.parametrize(
    ("short", "whole"),
    [("causal", "padding_causal"), ("no_mask", "padding"), ("causal_bottom_right", "padding_causal_bottom_right")],
)
def test_a_mask_type_need_not_say_padding(short, whole):
    lengths = SEQUENCES["more keys"]
    *inputs, _ = operands(lengths, 4, 0)
    sequences = {"cu_seqlens_q": cumulative(lengths[0]), "cu_seqlens_kv": cumulative(lengths[1])}
    module = te.DotProductAttention(H, (D, DV), qkv_format="thd", attn_mask_type=short)
    assert torch.equal(module(*inputs, **sequences), module(*inputs, attn_mask_type=whole, **sequences))


@pytest.mark.parametrize("form", [False, True], ids=["chosen", "written_out"])
def test_self_attention_takes_the_queries_lengths_for_its_keys_and_any_longest_length(form):
    lengths = SEQUENCES["self"]
    *inputs, _ = operands(lengths, 4, 0)
    ends = cumulative(lengths[0])
    module = te.DotProductAttention(H, (D, DV), qkv_format="thd")
    module.always_written_out = form
    y = module(*inputs, cu_seqlens_q=ends)
    assert torch.equal(module(*inputs, cu_seqlens_q=ends, cu_seqlens_kv=ends.long()), y)
    for more in (5, 64):
        longer = module(*inputs, cu_seqlens_q=ends, max_seqlen_q=more, max_seqlen_kv=more, cu_seqlens_kv=ends)
        torch.testing.assert_close(longer, y)


def test_the_choice_is_torchs_kernels_a_sequence_at_a_time_where_they_do_the_same():
    lengths = SEQUENCES["more keys"]
    *inputs, _ = operands(lengths, 4, 0)
    sequences = {"cu_seqlens_q": cumulative(lengths[0]), "cu_seqlens_kv": cumulative(lengths[1])}
    module = te.DotProductAttention(H, (D, DV), qkv_format="thd")
    assert module.choice(*inputs, **sequences)[:2] == (
        "torch",
        "torch's kernels compute the same thing and keep no scores, sequence by sequence",
    )
    for arguments in ({"window_size": (1, 0)}, {"attn_mask_type": "padding_causal_bottom_right"}):
        choice = module.choice(*inputs, **sequences, **arguments)
        assert choice.implementation == "torch"
        assert "under a mask tensor; queries that see no key are set to 0" in choice.reason


ENDS = torch.tensor([0, 3, 5])
BAD = {
    "no lengths": ({}, "cu_seqlens_q: got None; accepted: int32 or int64 on cpu"),
    "fp32": ({"cu_seqlens_q": ENDS.float()}, r"cu_seqlens_q: got torch.float32 \(3,\)"),
    "matrix": ({"cu_seqlens_q": ENDS[None]}, r"cu_seqlens_q: got torch.int64 \(1, 3\)"),
    "not from 0": ({"cu_seqlens_q": ENDS + 1}, r"cu_seqlens_q: got \[1, 4, 6\]; .*from 0 on"),
    "falling": ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, r"cu_seqlens_q: got \[0, 4, 3\]; .*never falling"),
    "too many tokens": ({"cu_seqlens_q": ENDS * 2}, "cu_seqlens_q: got 10 tokens by its last number; .*at most 5"),
    "other batch": ({"cu_seqlens_q": ENDS, "cu_seqlens_q_padded": ENDS[:2]}, "got 2 numbers for a batch of 2"),
    "overlap": (
        {"cu_seqlens_q": ENDS, "cu_seqlens_q_padded": torch.tensor([0, 2, 5])},
        r"cu_seqlens_q_padded: got \[0, 2, 5\] for lengths \[3, 2\]; accepted: room for each",
    ),
    "short longest": ({"cu_seqlens_q": ENDS, "max_seqlen_q": 2}, "max_seqlen_q: got 2; accepted: at least 3"),
    "longest": ({"cu_seqlens_q": ENDS, "max_seqlen_q": 3.0}, "max_seqlen_q: got 3.0; accepted: an int"),
    "mask": ({"cu_seqlens_q": ENDS, "attention_mask": torch.zeros(1, dtype=torch.bool)}, "attention_mask: .*thd"),
    "arbitrary": ({"cu_seqlens_q": ENDS, "attn_mask_type": "arbitrary"}, "attn_mask_type: .*pass padded sequences"),
    "no gaps": (
        {"cu_seqlens_q": ENDS, "cu_seqlens_q_padded": ENDS, "pad_between_seqs": False},
        "pad_between_seqs: got False with cu_seqlens_q_padded",
    ),
    "gaps": ({"cu_seqlens_q": ENDS, "pad_between_seqs": "yes"}, "pad_between_seqs: got 'yes'"),
    "rank": ({"query_layer": torch.zeros(1, 5, H, D)}, r"query_layer: got shape \(1, 5, 4, 8\); accepted: \[t, 4, 8\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_lengths_are_refused_by_name(name):
    arguments, message = BAD[name]
    tokens = torch.zeros(5, H, D)
    given = {"query_layer": tokens, "key_layer": tokens, "value_layer": tokens, **arguments}
    with pytest.raises(ValueError, match=message) as caught:
        te.DotProductAttention(H, D, qkv_format="thd")(**given)
    assert isinstance(caught.value, TeHalError)


ROWS = {
    "not under causal": ({"cu_seqlens_q": ENDS}, "cu_seqlens_q: got lengths under attn_mask_type='causal'"),
    "mask and lengths": (
        {"attn_mask_type": "padding", "cu_seqlens_q": ENDS, "attention_mask": torch.zeros(2, 1, 1, 4) > 0},
        "beside an attention_mask",
    ),
    "longer than a row": ({"attn_mask_type": "padding", "cu_seqlens_q": ENDS * 2}, r"lengths \[6, 4\]; accepted: at m"),
    "offsets": ({"cu_seqlens_q_padded": ENDS}, "cu_seqlens_q_padded: got a value for rows of one length"),
    "gaps": ({"pad_between_seqs": True}, "pad_between_seqs: got a value for rows of one length"),
    "longest": ({"max_seqlen_q": 3}, "max_seqlen_q: got 3; accepted: 4, which every row has"),
    "batch": ({"attn_mask_type": "padding", "cu_seqlens_q": ENDS[:2]}, "got 2 numbers for a batch of 2"),
}


@pytest.mark.parametrize("name", ROWS)
def test_lengths_that_rows_of_one_length_do_not_have_are_refused(name):
    arguments, message = ROWS[name]
    rows = torch.zeros(4, 2, H, D)
    with pytest.raises(ValueError, match=message):
        te.DotProductAttention(H, D)(rows, rows, rows, **arguments)


@pytest.mark.parametrize("qkv_format", ["sbhd", "thd"])
def test_cross_attention_takes_no_lengths_of_queries_for_keys(qkv_format):
    module = te.DotProductAttention(H, D, qkv_format=qkv_format, attn_mask_type="padding", attention_type="cross")
    tokens = torch.zeros(*((5,) if qkv_format == "thd" else (4, 2)), H, D)
    with pytest.raises(ValueError, match="cu_seqlens_kv: got None; accepted: int32 or int64"):
        module(tokens, tokens, tokens, cu_seqlens_q=ENDS)


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
def test_queries_keys_and_values_may_come_in_one_tensor(qkv_format, dim):
    lead = (6,) if qkv_format == "thd" else (3, 2)
    apart = [torch.randn(*lead, H, D) for _ in range(3)]
    module = te.DotProductAttention(H, D, qkv_format=qkv_format)
    ends = {"cu_seqlens_q": torch.tensor([0, 2, 6])} if qkv_format == "thd" else {}
    y = module(*apart, **ends)
    assert torch.equal(module(qkv_layer=torch.stack(apart, dim), qkv_interleave_dim=dim, **ends), y)
    pair = torch.stack(apart[1:], dim)
    assert torch.equal(module(apart[0], kv_layer=pair, qkv_interleave_dim=dim, **ends), y)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"qkv_layer": [1]}, TypeError, "qkv_layer: got a list"),
        ({"qkv_layer": torch.zeros(3, 2, 2, H, D)}, ValueError, r"qkv_layer: .*accepted: \[s, b, 3, h, d\]"),
        ({"kv_layer": torch.zeros(3, 2, H, 3, D), "qkv_interleave_dim": -2}, ValueError, r"\[s, b, h, 2, d\]"),
        ({"qkv_layer": torch.zeros(3, 2, 3, H, D), "qkv_interleave_dim": 1}, ValueError, "qkv_interleave_dim: got 1"),
        ({"qkv_layer": torch.zeros(3, 2, 3, H, D), "key_layer": torch.zeros(1)}, ValueError, "got it and key_layer"),
        ({"qkv_layer": torch.zeros(3, 2, 3, H, D), "qkv_interleave_dim": -3.0}, ValueError, "_dim: got -3.0"),
        ({"qkv_interleave_dim": -2}, ValueError, "qkv_interleave_dim: got -2 without qkv_layer"),
    ],
    ids=str,
)
def test_a_packed_tensor_that_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        te.DotProductAttention(H, D)(**arguments)


@pytest.mark.parametrize("ends", [[0, 9], [0, 4, 5, 9]], ids=["fewer", "more"])
def test_keys_of_another_number_of_sequences_than_queries_are_refused(ends):
    module = te.DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding", attention_dropout=0.0)
    x = torch.randn(9, 2, 8)
    said = rf"cu_seqlens_kv: got {len(ends) - 1} sequences of keys for 2 of queries; accepted: as many of both"
    with pytest.raises(ValueError, match=said):
        module(x, x, x, cu_seqlens_q=torch.tensor([0, 4, 9]), cu_seqlens_kv=torch.tensor(ends))
