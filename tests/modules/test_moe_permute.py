"""Rows to experts and back, against loops over tokens in float64 and against recorded values."""

from __future__ import annotations

import golden_values
import pytest
import torch
from moe_by_hand import DROPPED, masks, merged, permuted, rows_of_indices, rows_of_mask

import te_hal.modules as te
from te_hal.modules.moe.row_functions import GatherRows, SumRows
from te_hal.modules.moe.row_map import permutation_of_mask

MASKS = masks()
ROUTINGS = pytest.mark.parametrize("which", MASKS)
HIDDEN = 16


def tokens(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, HIDDEN).to(dtype).requires_grad_()


def probabilities(mask: torch.Tensor) -> torch.Tensor:
    return (torch.rand(mask.shape) + 0.1).requires_grad_()


def test_recorded_rows_map_and_merged_tokens_are_reproduced_bit_for_bit():
    recorded = golden_values.load("functional").case("moe/mask")
    count = recorded["permuted"].shape[0]
    rows, row_id_map = te.moe_permute(recorded["x"], recorded["routing_map"], count)
    assert torch.equal(rows, recorded["permuted"])
    experts, reference = recorded["routing_map"].shape[1], recorded["row_id_map"]
    assert (row_id_map.shape, row_id_map.dtype) == (reference.shape, torch.int32)
    for mine, theirs in zip(row_id_map, reference, strict=True):
        routed = int(theirs[-1])
        assert mine[-1] == routed
        for start in (0, experts):  # what follows is memory that nobody set
            assert torch.equal(mine[start : start + routed], theirs[start : start + routed])
    merged_back = te.moe_unpermute(rows, reference, recorded["probs"], restore_shape=recorded["x"].shape)
    assert torch.equal(merged_back, recorded["unpermuted"])
    assert torch.equal(te.moe_unpermute(rows, row_id_map, recorded["probs"]), recorded["unpermuted"])


@ROUTINGS
@pytest.mark.parametrize("align", [None, 1, 4, 16])
@pytest.mark.parametrize("with_probs", [False, True], ids=["sums", "weighted"])
def test_every_routing_with_and_without_padding_is_that_of_a_loop_over_tokens(which, align, with_probs):
    mask = MASKS[which]
    x, probs, by_hand = tokens(len(mask)), probabilities(mask), rows_of_mask(mask, align or 1)
    if align is None:
        rows, row_probs, row_id_map = te.moe_permute_with_probs(x, probs, mask)
        offsets = None
    else:
        counts = mask.sum(0)
        rows, row_probs, row_id_map, offsets, padded = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, align)
        assert padded.tolist() == [-(-count // align) * align for count in counts.tolist()]
        assert (offsets is None) == (padded.tolist() == counts.tolist())
    assert torch.equal(rows, permuted(x, by_hand))
    of_row = [0.0 if token is None else probs[token, expert].item() for token, expert in zip(*by_hand, strict=True)]
    assert row_probs.tolist() == of_row
    y = torch.randn(rows.shape).requires_grad_()
    back = te.moe_unpermute(y, row_id_map, probs if with_probs else None, pad_offsets=offsets)
    exact = merged(y.double(), by_hand, len(mask), probs.double() if with_probs else None)
    assert torch.allclose(back.double(), exact, rtol=1e-6, atol=1e-6)
    weights = [torch.randn(of.shape) for of in (rows, row_probs, back)]
    leaves = (x, probs, y)
    found = torch.autograd.grad(_weighted((rows, row_probs, back), weights), leaves, materialize_grads=True)
    wide = permuted(x.double(), by_hand)
    zero = probs.sum() * 0
    of_rows = [zero if token is None else probs[token, expert] for token, expert in zip(*by_hand, strict=True)]
    wide_probs = torch.stack(of_rows).double() if of_rows else probs.double().sum()[None][:0]
    expected = torch.autograd.grad(_weighted((wide, wide_probs, exact), weights), leaves, materialize_grads=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine.double(), theirs.double(), rtol=1e-5, atol=1e-5)


def _weighted(values: tuple[torch.Tensor, ...], weights: list[torch.Tensor]) -> torch.Tensor:
    return sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))


INDICES = {
    "two_each": [[0, 3], [3, 1], [1, 0], [2, 3]],
    "dropped": [[0, DROPPED], [1, 0], [DROPPED, DROPPED]],
    "one_each": [[2], [0], [2], [1]],
    "same_twice": [[1, 1], [0, 1]],
    "nothing": [[DROPPED, DROPPED]],
    "no_tokens": [],
}


@pytest.mark.parametrize("which", INDICES)
def test_a_map_of_indices_is_that_of_a_loop_and_merges_by_its_choices(which):
    indices = torch.tensor(INDICES[which], dtype=torch.int32)
    indices = indices if len(indices) else indices.view(0, 2)
    by_hand, x = rows_of_indices(indices), tokens(len(indices))
    rows, row_id_map = te.moe_permute(x, indices, map_type="index")
    assert torch.equal(rows, x[[token for token, _ in by_hand]])
    assert row_id_map.dtype == torch.int32
    probs = torch.rand(indices.shape).requires_grad_()
    y = torch.randn(rows.shape).requires_grad_()
    back = te.moe_unpermute(y, row_id_map, probs, map_type="index")
    exact = torch.zeros(x.shape, dtype=torch.float64)
    for row, (token, choice) in enumerate(by_hand):
        exact[token] = exact[token] + y[row].double() * probs[token, choice].double()
    assert torch.allclose(back.double(), exact, atol=1e-6)
    weights, leaves = torch.randn(back.shape), (y, probs)
    found = torch.autograd.grad((back * weights).sum(), leaves, materialize_grads=True)
    exact = exact + y.sum() * 0 + probs.sum() * 0
    expected = torch.autograd.grad((exact * weights).sum(), leaves)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    summed = te.moe_unpermute(y, row_id_map, restore_shape=x.shape, map_type="index")
    assert torch.allclose(summed, te.moe_unpermute(y, row_id_map, torch.ones(indices.shape), map_type="index"))


def test_dropped_choices_are_absent_and_a_token_without_any_gets_zeros():
    x = torch.arange(12.0).view(3, 4)
    rows, row_id_map = te.moe_permute(x, torch.tensor([[0, -1], [1, 0], [-1, -1]]), map_type="index")
    assert torch.equal(rows, x[[0, 1, 1]])
    probs = torch.tensor([[0.5, float("nan")], [0.25, 2.0], [float("nan"), float("inf")]])
    rows[0] = float("nan")  # which a dropped choice must not read
    rows[0, 0] = 4.0
    back = te.moe_unpermute(rows, row_id_map, probs, map_type="index")
    assert back[0, 0] == 2.0
    assert torch.equal(back[1], x[1] * 0.25 + x[1] * 2.0)
    assert torch.equal(back[2], torch.zeros(4))


def test_rows_are_found_by_64_bit_indices():
    mask = torch.ones(3, 2, dtype=torch.bool)
    made = permutation_of_mask(mask, None, None)
    assert {made.source.dtype, made.slots.dtype, made.choices.dtype} == {torch.int64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_run_in_fp32_and_are_rounded_once(dtype):
    mask = torch.ones(1, 4, dtype=torch.bool)
    values = torch.tensor([[256.0], [1.0], [1.0], [1.0]]).expand(4, HIDDEN).to(dtype)
    _, row_id_map = te.moe_permute(torch.zeros(1, HIDDEN, dtype=dtype), mask)
    assert torch.equal(te.moe_unpermute(values, row_id_map), torch.full((1, HIDDEN), 259.0).to(dtype))
    x = torch.ones(1, HIDDEN, dtype=dtype, requires_grad=True)
    te.moe_permute(x, mask)[0].backward(values)
    assert torch.equal(x.grad, torch.full((1, HIDDEN), 259.0).to(dtype))


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_fewer_rows_than_are_routed_drop_the_last_ones_as_if_they_were_not_routed(map_type):
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(12)])
    by_expert = sorted(
        (expert, token, k) for token, pair in enumerate(indices.tolist()) for k, expert in enumerate(pair)
    )
    kept = by_expert[:17]
    x, probs = tokens(12), torch.rand(12, 2).requires_grad_()
    if map_type == "index":
        rows, row_id_map = te.moe_permute(x, indices, 17, map_type="index")
        weights = probs
    else:
        mask = torch.zeros(12, 4, dtype=torch.bool).scatter(1, indices, True)
        weights = torch.zeros(12, 4).scatter(1, indices, probs)
        rows, row_probs, row_id_map = te.moe_permute_with_probs(x, weights, mask, 17)
        assert row_id_map[:, -1].tolist() == [sum(token == own for _, own, _ in kept) for token in range(12)]
        assert row_probs.tolist() == [probs[token, k].item() for _, token, k in kept]
    assert torch.equal(rows, torch.stack([x[token] for _, token, _ in kept]))
    merged_back = te.moe_unpermute(rows, row_id_map, weights, map_type=map_type)
    share = torch.stack([sum((probs[t, k] for _, t, k in kept if t == own), probs.sum() * 0) for own in range(12)])
    exact = share.double().unsqueeze(1) * x.double()
    assert torch.allclose(merged_back.double(), exact, rtol=1e-6, atol=1e-6)
    seed = torch.randn(12, HIDDEN)
    found, expected = (
        torch.autograd.grad((of * seed).sum(), (x, probs), retain_graph=True) for of in (merged_back, exact)
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_more_rows_than_are_routed_are_zeros_and_take_no_gradient():
    mask = MASKS["two_each"]
    x, probs = tokens(12), probabilities(mask)
    rows, row_probs, row_id_map = te.moe_permute_with_probs(x, probs, mask, 30)
    assert rows.shape == (30, HIDDEN)
    assert not rows[24:].any()
    assert not row_probs[24:].any()
    gradient = torch.ones_like(rows)
    gradient[24:] = float("nan")
    rows.backward(gradient)
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    y = torch.randn(30, HIDDEN, requires_grad=True)
    te.moe_unpermute(y, row_id_map).sum().backward()
    assert torch.equal(y.grad, torch.cat([torch.ones(24, HIDDEN), torch.zeros(6, HIDDEN)]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8], ids=str)
def test_a_mask_may_be_of_bools_or_of_integers(dtype):
    mask, x = MASKS["as_it_comes"], tokens(12)
    expected = te.moe_permute(x, mask)
    assert all(map(torch.equal, te.moe_permute(x, mask.to(dtype)), expected))


QUANTIZERS = {
    "per_tensor": lambda: te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
    "1x128": lambda: te.Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True, block_scaling_dim=1),
    "mxfp8": lambda: te.MXFP8Quantizer(torch.float8_e4m3fn),
    "mtfp8": lambda: te.MTFP8Quantizer(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("padded", [False, True], ids=["as_routed", "padded"])
def test_quantized_rows_travel_with_their_scales_and_nothing_is_rounded_again(kind, padded):
    mask = torch.zeros(64, 5, dtype=torch.bool).scatter(1, torch.rand(64, 5).topk(2).indices, value=True)
    plain = (torch.randn(64, 256) * torch.logspace(-3, 3, 64)[:, None]).requires_grad_()
    quantized, probs = QUANTIZERS[kind]()(plain), torch.rand(64, 5)
    if padded:
        rows = te.moe_permute_and_pad_with_probs(quantized, probs, mask, mask.sum(0), 32)[0]
        expected = te.moe_permute_and_pad_with_probs(quantized.dequantize(), probs, mask, mask.sum(0), 32)[0]
    else:
        rows, expected = te.moe_permute(quantized, mask)[0], te.moe_permute(quantized.dequantize(), mask)[0]
    assert type(rows) is type(quantized)
    assert torch.equal(rows.dequantize(), expected)
    rows.dequantize().sum().backward()
    assert torch.equal(plain.grad, torch.full_like(plain, 2.0))


@pytest.mark.parametrize("kind", ["per_tensor", "mxfp8"])
def test_quantized_rows_of_no_tokens_and_rows_beyond_are_zeros(kind):
    quantized = QUANTIZERS[kind]()(torch.randn(32, 64))
    rows, _ = te.moe_permute(quantized, torch.zeros(32, 3, dtype=torch.bool), 32)
    assert rows.shape == (32, 64)
    assert not rows.dequantize().any()


def test_quantized_rows_that_share_scales_are_refused_by_name():
    square = te.Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True, block_scaling_dim=2)
    with pytest.raises(NotImplementedError, match=r"moe_permute: got .*128x128.*permute before quantizing"):
        te.moe_permute(square(torch.randn(128, 128)), torch.ones(128, 2, dtype=torch.bool))
    quantized = QUANTIZERS["per_tensor"]()(torch.randn(8, HIDDEN))
    with pytest.raises(TypeError, match=r"moe_unpermute: inp: got a Float8Tensor.*dequantize\(\)"):
        te.moe_unpermute(quantized, te.moe_permute(torch.randn(8, HIDDEN), torch.ones(8, 1, dtype=torch.bool))[1])


def test_gradients_agree_with_finite_differences():
    made = permutation_of_mask(MASKS["dropped_tokens"], None, None)
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: GatherRows.apply(rows, made.source, made.slots, ""), (x,))
    y = torch.randn(len(made.source), 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(made.slots.shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: SumRows.apply(*given, made.slots, ""), (y, weights))


@pytest.mark.parametrize("sizes", [[3, 0, 4, 1, 4], [12], [0, 12], [12, 0, 0]], ids=str)
def test_chunks_in_another_order_are_those_of_split_and_cat(sizes):
    x, probs = tokens(12), torch.rand(12).requires_grad_()
    order = torch.randperm(len(sizes))
    found, found_probs = te.moe_sort_chunks_by_index_with_probs(x, probs, torch.tensor(sizes, dtype=torch.int32), order)
    expected = torch.cat([x.split(sizes)[number] for number in order.tolist()])
    assert torch.equal(found, expected)
    assert torch.equal(found_probs, torch.cat([probs.split(sizes)[number] for number in order.tolist()]))
    assert torch.equal(te.moe_sort_chunks_by_index(x, torch.tensor(sizes), order), expected)
    weights = torch.randn(12, HIDDEN)
    mine = torch.autograd.grad((found * weights).sum() + (found_probs * weights[:, 0]).sum(), (x, probs))
    assert torch.equal(mine[0], torch.autograd.grad((expected * weights).sum(), x)[0])
    assert torch.equal(te.moe_sort_chunks_by_index(mine[1][:, None], torch.tensor(sizes), order)[:, 0], weights[:, 0])


def test_the_older_name_of_the_probabilities_warns_and_works():
    mask = MASKS["two_each"]
    rows, row_id_map = te.moe_permute(tokens(12), mask)
    probs = torch.rand(12, 5)
    with pytest.warns(DeprecationWarning, match="probs is the older name of merging_probs"):
        found = te.moe_unpermute(rows, row_id_map, probs=probs)
    assert torch.equal(found, te.moe_unpermute(rows, row_id_map, probs))


def test_quantized_gradients_are_those_of_their_values():
    mask, x = torch.ones(16, 1, dtype=torch.bool), tokens(16)
    quantized = QUANTIZERS["per_tensor"]()(torch.randn(16, HIDDEN))
    rows, row_id_map = te.moe_permute(x, mask)
    back = te.moe_unpermute(rows, row_id_map, torch.full((16, 1), 2.0))
    assert torch.equal(torch.autograd.grad(back, x, quantized, retain_graph=True)[0], 2 * quantized.dequantize())
    assert torch.equal(torch.autograd.grad(rows, x, quantized)[0], quantized.dequantize())


def test_second_derivatives_are_refused():
    x = tokens(12)
    rows, row_id_map = te.moe_permute(x, MASKS["two_each"])
    with pytest.raises(NotImplementedError, match="moe_permute: backward: got create_graph=True"):
        torch.autograd.grad(rows.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="moe_unpermute: backward: got create_graph=True"):
        torch.autograd.grad(te.moe_unpermute(rows, row_id_map).sum(), x, create_graph=True)


def test_rows_travel_both_ways_without_waiting_for_a_device():
    """Nothing on meta can be waited for: looking at a value there is an error."""
    source, slots = torch.tensor([0, 2, -1, 1]), torch.tensor([[0, -1], [3, -1], [1, -1]])
    for weighted in (False, True):
        rows = torch.empty(3, HIDDEN, device="meta", requires_grad=True)
        weights = torch.empty(3, 2, device="meta", requires_grad=True) if weighted else None
        moved = GatherRows.apply(rows, source.to("meta"), slots.to("meta"), "test")
        merged = SumRows.apply(moved, weights, slots.to("meta"), "test")
        merged.sum().backward()
        assert (moved.shape, merged.shape, rows.grad.shape) == ((4, HIDDEN), (3, HIDDEN), (3, HIDDEN))
        assert weights is None or weights.grad.shape == (3, 2)


def test_a_slot_of_nobody_gives_nothing_whatever_its_weight_and_the_row_it_would_read():
    rows = torch.tensor([[torch.nan], [2.0]]).requires_grad_()
    slots, weights = torch.tensor([[1, -1]]), torch.tensor([[3.0, torch.inf]]).requires_grad_()
    merged = SumRows.apply(rows, weights, slots, "test")
    merged.backward(torch.ones(1, 1))
    assert merged.tolist() == [[6.0]]
    assert (rows.grad.tolist(), weights.grad.tolist()) == ([[0.0], [3.0]], [[2.0, 0.0]])
