"""The router against loops over tokens in float64, finite differences, and what cannot be."""

from __future__ import annotations

import math

import pytest
import torch

import te_hal.modules as te
from te_hal.modules.moe.router import aux_scores, weights_and_choice
from te_hal.modules.router import (
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

EXPERTS, TOKENS = 12, 20
SCORES = {
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sqrtsoftplus": lambda x: math.sqrt(math.log1p(math.exp(x))),
}
CASES = {
    "softmax_after": {"score_function": "softmax", "use_pre_softmax": False},
    "softmax_before": {"score_function": "softmax", "use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid_biased": {"score_function": "sigmoid", "expert_bias": True},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
    "sqrtsoftplus_biased": {"score_function": "sqrtsoftplus", "expert_bias": True},
}
CHOICES = {
    "one": {"topk": 1},
    "four": {"topk": 4},
    "all": {"topk": EXPERTS},
    "grouped": {"topk": 4, "num_groups": 4, "group_topk": 2},
    "one_group": {"topk": 3, "num_groups": 4, "group_topk": 1},
    "scaled": {"topk": 2, "scaling_factor": 2.5},
}


def routed(logits: torch.Tensor, topk: int, **settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {"use_pre_softmax": False, "num_groups": None, "group_topk": None, "scaling_factor": None}
    arguments |= {"score_function": "softmax", "expert_bias": None, **settings}
    return fused_topk_with_score_function(logits, topk, **arguments)


def softmax(values: list[float]) -> list[float]:
    exponentials = [math.exp(value - max(values)) for value in values]
    return [value / sum(exponentials) for value in exponentials]


def chosen_by_hand(scores: list[float], topk: int, num_groups: int | None, group_topk: int | None) -> list[int]:
    allowed = list(range(len(scores)))
    if num_groups:
        size = len(scores) // num_groups
        best = [sum(sorted(scores[g * size :][:size])[-(topk // group_topk) :]) for g in range(num_groups)]
        groups = sorted(range(num_groups), key=lambda g: -best[g])[:group_topk]
        allowed = [expert for expert in allowed if expert // size in groups]
    return sorted(allowed, key=lambda expert: -scores[expert])[:topk]


def by_hand(logits: list[float], bias: list[float], topk: int, settings: dict[str, object]) -> dict[int, float]:
    """The weight of each chosen expert of one token."""
    groups = settings.get("num_groups"), settings.get("group_topk")
    kind = settings["score_function"]
    if kind == "softmax":
        before = settings.get("use_pre_softmax")
        scores = softmax(logits) if before else logits
        experts = chosen_by_hand(scores, topk, *groups)
        weights = [scores[expert] for expert in experts]
        weights = weights if before else softmax(weights)
    else:
        scores = [SCORES[kind](value) for value in logits]
        experts = chosen_by_hand([s + b for s, b in zip(scores, bias, strict=True)], topk, *groups)
        weights = [scores[expert] for expert in experts]
        weights = [weight / sum(weights) for weight in weights] if topk > 1 else weights
    return {e: w * settings.get("scaling_factor", 1.0) for e, w in zip(experts, weights, strict=True)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("choice", CHOICES)
def test_weights_and_map_are_those_of_a_loop_over_tokens(case, choice):
    settings = {**CASES[case], **CHOICES[choice]}
    topk = settings.pop("topk")
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    bias = torch.randn(EXPERTS, requires_grad=True)
    biased = settings.pop("expert_bias", False)
    probs, chosen = routed(logits, topk, expert_bias=bias if biased else None, **settings)
    added = bias.tolist() if biased else [0.0] * EXPERTS
    expected = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    for token, row in enumerate(logits.double().tolist()):
        for expert, weight in by_hand(row, added, topk, settings).items():
            expected[token, expert] = weight
    assert torch.equal(chosen, expected > 0)
    assert (probs.dtype, chosen.dtype) == (torch.float32, torch.bool)
    assert torch.allclose(probs.double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(probs != 0, chosen)
    (probs * torch.randn(probs.shape)).sum().backward()
    assert bias.grad is None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("topk", [1, 3])
def test_gradients_agree_with_finite_differences(case, topk):
    settings = dict(CASES[case])
    kind, first = settings["score_function"], settings.get("use_pre_softmax", False)
    bias = torch.randn(6, dtype=torch.float64) if settings.get("expert_bias") else None
    # Far enough apart that no step changes the choice.
    logits = (torch.rand(4, 6).argsort(dim=1) * 0.3 - 0.7).double().requires_grad_()
    for groups in ((None, None), (3, topk)):
        assert torch.autograd.gradcheck(
            lambda x, groups=groups: weights_and_choice(x, topk, groups, kind, bias, softmax_first=first)[0], (logits,)
        )
    assert torch.autograd.gradcheck(lambda x: aux_scores(x, topk, kind), (logits,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_logits_of_16_bits_are_computed_in_fp32_and_rounded_once(case, dtype):
    settings = {**CASES[case]}
    settings["expert_bias"] = torch.randn(EXPERTS) if settings.get("expert_bias") else None
    logits = torch.randn(2, TOKENS, EXPERTS).to(dtype).requires_grad_()
    wide = logits.detach().float().requires_grad_()
    (probs, chosen), (exact, same) = routed(logits, 4, **settings), routed(wide, 4, **settings)
    assert torch.equal(chosen, same)
    assert torch.equal(probs, exact.to(dtype))
    weights = torch.randn(probs.shape).to(dtype)
    probs.backward(weights)
    exact.backward(weights.float())
    assert torch.equal(logits.grad, wide.grad.to(dtype))


@pytest.mark.parametrize("kind", ["softmax", *SCORES])
@pytest.mark.parametrize("value", [-200.0, 200.0], ids=str)
def test_logits_however_large_give_finite_weights_and_gradients(kind, value):
    logits = torch.full((3, EXPERTS), value)
    logits[0, 4] = -value
    logits.requires_grad_()
    probs, chosen = routed(logits, 2, score_function=kind)
    probs.sum().backward()
    scores = fused_compute_score_for_moe_aux_loss(logits, 2, kind)[1]
    assert all(tensor.isfinite().all() for tensor in (probs, logits.grad, scores))
    assert (chosen.sum(-1) == 2).all()


def test_of_equal_scores_the_lower_experts_are_chosen():
    for kind in ("softmax", *SCORES):
        _, chosen = routed(torch.zeros(2, EXPERTS), 3, score_function=kind)
        assert chosen.nonzero()[:, 1].tolist() == [0, 1, 2] * 2


@pytest.mark.parametrize("written", [RoutingMapFormat.BITMAP_U8, 1, "bitmap_u8"], ids=str)
@pytest.mark.parametrize("experts", [3, 8, 12])
def test_a_bitmap_has_the_lowest_bit_for_the_first_expert(written, experts):
    logits = torch.randn(TOKENS, experts)
    bits, bytemap = (routed(logits, 2, routing_map_format=of)[1] for of in (written, "bytemap"))
    assert (bits.dtype, bits.shape) == (torch.uint8, (TOKENS, -(-experts // 8)))
    for token, row in enumerate(bytemap.tolist()):
        for expert, chosen in enumerate(row):
            assert bool(bits[token, expert // 8] >> (expert % 8) & 1) is chosen
    assert torch.equal(fused_compute_score_for_moe_aux_loss(logits, 2, "softmax", written)[0], bits)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_go_into_the_callers_tensor_best_first(dtype):
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    buffer = torch.full((TOKENS, 3), -7, dtype=dtype)
    probs, returned = routed(logits, 3, topk_indices=buffer)
    assert returned is buffer
    assert torch.equal(buffer.long(), logits.topk(3).indices)
    assert torch.equal(probs, routed(logits, 3)[0])


@pytest.mark.parametrize("kind", ["softmax", *SCORES])
@pytest.mark.parametrize("topk", [1, 4])
def test_scores_for_the_loss_are_those_of_all_experts(kind, topk):
    logits = torch.randn(TOKENS, EXPERTS).to(torch.bfloat16)
    chosen, scores = fused_compute_score_for_moe_aux_loss(logits, topk, kind)
    for row, found, mask in zip(logits.double().tolist(), scores, chosen, strict=True):
        exact = softmax(row) if kind == "softmax" else [SCORES[kind](value) for value in row]
        if kind != "softmax" and topk > 1:
            exact = [value / sum(exact) for value in exact]
        assert torch.allclose(found.double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-5)
        assert mask.sum() == topk
        assert row[int(mask.nonzero()[0])] >= sorted(row)[-topk]
    assert scores.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("total", [TOKENS, torch.tensor(TOKENS)], ids=["int", "tensor"])
def test_the_balancing_loss_is_the_formula(total, dtype):
    probs = torch.rand(TOKENS, EXPERTS).to(dtype).requires_grad_()
    counts = torch.randint(0, 9, (EXPERTS,))
    loss = fused_moe_aux_loss(probs, counts, total, EXPERTS, 2, 0.01)
    exact = probs.detach().double().requires_grad_()
    formula = (exact.sum(0) * counts).sum() * EXPERTS * 0.01 / (2 * TOKENS**2)
    step = 1e-6 if dtype == torch.float32 else 2**-8
    assert loss.dtype == dtype
    assert abs(loss.item() - formula.item()) <= step * formula.item()
    loss.backward()
    formula.backward()
    assert torch.allclose(probs.grad.double(), exact.grad, rtol=step)


def test_the_loss_is_least_where_tokens_are_spread_evenly():
    even, uneven = torch.eye(4).repeat(4, 1), torch.eye(4)[[0] * 13 + [1, 2, 3]]
    losses = [fused_moe_aux_loss(probs, probs.sum(0), 16, 4, 1, 1.0).item() for probs in (even, uneven)]
    assert losses[0] == pytest.approx(1.0)
    assert losses[1] > 2.5


L = torch.zeros(5, EXPERTS)
WRONG = {
    "float64": ({"logits": L.double()}, "logits: got .*torch.float64"),
    "integers": ({"logits": L.int()}, "logits: got .*torch.int32"),
    "topk": ({"topk": 13}, "topk: got 13 of 12 experts"),
    "no topk": ({"topk": 0}, "topk: got 0"),
    "function": ({"score_function": "relu"}, "score_function: got 'relu'; accepted: 'softmax', 'sigmoid'"),
    "flag": ({"use_pre_softmax": None}, "use_pre_softmax: got None"),
    "one of both": ({"num_groups": 4}, "num_groups, group_topk: got num_groups=4, group_topk=None"),
    "uneven groups": ({"num_groups": 5, "group_topk": 2}, "num_groups, group_topk: got num_groups=5"),
    "more than groups": ({"num_groups": 2, "group_topk": 3, "topk": 4}, "num_groups, group_topk"),
    "no room": ({"num_groups": 6, "group_topk": 1, "topk": 3}, "num_groups, group_topk: .*room for topk"),
    "bias of softmax": ({"expert_bias": torch.zeros(EXPERTS)}, "expert_bias: got .* with 'softmax'"),
    "bias": ({"expert_bias": torch.zeros(3), "score_function": "sigmoid"}, r"expert_bias: got shape \(3,\)"),
    "bias of ints": (
        {"expert_bias": torch.zeros(EXPERTS, dtype=torch.int64), "score_function": "sigmoid"},
        "expert_bias: got .*torch.int64.*a floating dtype",
    ),
    "bias elsewhere": (
        {"expert_bias": torch.zeros(EXPERTS, device="meta"), "score_function": "sigmoid"},
        "expert_bias: got .* on meta .*accepted: .* on cpu",
    ),
    "factor": ({"scaling_factor": "2"}, "scaling_factor: got '2'"),
    "format": ({"routing_map_format": "bits"}, "routing_map_format: got 'bits'"),
    "format's number": ({"routing_map_format": 2}, "routing_map_format: got 2"),
    "indices": ({"topk_indices": torch.zeros(5, 3, dtype=torch.int64)}, r"topk_indices: got shape \(5, 3\)"),
    "float indices": ({"topk_indices": torch.zeros(5, 2)}, "topk_indices: got .*torch.float32"),
    "quantile balancing": (
        {"qb_histogram_mode": "two_kernel"},
        "qb_histogram_mode: .*quantile balancing has no kernel",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_cannot_be_is_refused_by_name(which):
    arguments, message = WRONG[which]
    with pytest.raises((ValueError, NotImplementedError), match=f"fused_topk_with_score_function: {message}"):
        routed(**{"logits": L, "topk": 2, **arguments})


def test_a_loss_of_shapes_or_numbers_that_do_not_fit_is_refused():
    probs, counts = torch.rand(4, 3), torch.ones(3)
    good = {"total_num_tokens": 4, "num_experts": 3, "topk": 1, "coeff": 0.1}
    for wrong in (
        {"tokens_per_expert": torch.ones(4)},
        {"probs": probs.double()},
        {"total_num_tokens": 0},
        {"total_num_tokens": torch.ones(2, dtype=torch.int64)},
        {"num_experts": 0},
        {"topk": 1.5},
        {"coeff": None},
    ):
        with pytest.raises(ValueError, match="fused_moe_aux_loss"):
            fused_moe_aux_loss(**{"probs": probs, "tokens_per_expert": counts, **good, **wrong})
    for wrong in ({"probs": [1.0]}, {"tokens_per_expert": [1.0]}):
        with pytest.raises(TypeError, match=f"fused_moe_aux_loss: {next(iter(wrong))}: got a list"):
            fused_moe_aux_loss(**{"probs": probs, "tokens_per_expert": counts, **good, **wrong})


def test_what_is_no_tensor_is_a_type_error():
    with pytest.raises(TypeError, match="fused_topk_with_score_function: got a list"):
        routed([[1.0]], 1)
    with pytest.raises(TypeError, match="fused_topk_with_score_function: expert_bias: got a float"):
        routed(L, 1, score_function="sigmoid", expert_bias=1.0)
    with pytest.raises(TypeError, match="fused_compute_score_for_moe_aux_loss: got a list"):
        fused_compute_score_for_moe_aux_loss([[1.0]], 1, "softmax")


def test_routing_permuting_and_merging_give_a_token_the_weighted_sum_of_its_experts():
    torch.manual_seed(5)
    x, experts = torch.randn(TOKENS, 16), torch.randn(EXPERTS, 16, 16)
    probs, chosen = routed(torch.randn(TOKENS, EXPERTS), 3, score_function="sigmoid")
    rows, row_id_map = te.moe_permute(x, chosen)
    layer = te.GroupedLinear(EXPERTS, 16, 16, bias=False)
    with torch.no_grad():
        for number in range(EXPERTS):
            getattr(layer, f"weight{number}").copy_(experts[number])
    y = te.moe_unpermute(layer(rows, chosen.sum(0)), row_id_map, probs)
    exact = torch.einsum("te,eij,tj->ti", probs.double(), experts.double(), x.double())
    assert torch.allclose(y.double(), exact, atol=1e-4)
