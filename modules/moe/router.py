"""The router of a mixture of experts: which experts a token goes to, with which weights, and the loss that balances.

All of it is computed in fp32 from logits of any dtype of activations, and differentiable as often as wanted. "Fused" is
Transformer Engine's word: here these are compositions of torch's operations on tensors as small as the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.modules.arguments import check_number, check_size, check_tensor
from te_hal.modules.moe.checks import check_integers
from te_hal.modules.moe.routing_map import RoutingMapFormat, checked_format, routing_map
from te_hal.modules.moe.scores import SCORE_FUNCTIONS, SCORES, best, shares
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags
from te_hal.schema.formats import FLOATS
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from typing import TypeGuard

_QB = declare(
    "router.fused_topk_with_score_function",
    {"qb_histogram": None, "qb_bin_bounds": None, "qb_histogram_mode": None},
    dict.fromkeys(
        ("qb_histogram", "qb_bin_bounds", "qb_histogram_mode"),
        "quantile balancing has no kernel here; experts are balanced by expert_bias or an auxiliary loss",
    ),
)


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: RoutingMapFormat | str | int = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the ``topk`` experts of each token and weigh them.

    Args:
        logits: ``[..., experts]`` in fp32, bf16 or fp16.
        topk: experts per token.
        use_pre_softmax: with "softmax": softmax over all experts before the choice; else over the chosen ones.
        num_groups: of consecutive experts, for a choice within the best groups; None: without.
        group_topk: how many groups a token's experts come from; None: without.
        scaling_factor: the weights are multiplied by it; None: not.
        score_function: "softmax"; "sigmoid" or "sqrtsoftplus" (the root of softplus), whose weights are shares of the
            chosen scores' sum, or the score itself where ``topk`` is 1.
        expert_bias: ``[experts]``, added to the scores for the choice, not for the weights; not with "softmax". Gets no
            gradient.
        routing_map_format: how the map is written (RoutingMapFormat).
        topk_indices: integers ``[..., topk]``: gets the chosen experts, best first, in place, and is returned in place
            of the map.
        qb_histogram: refused by name, as ``qb_bin_bounds`` and ``qb_histogram_mode``: quantile balancing.
        qb_bin_bounds: see there.
        qb_histogram_mode: see there.

    Returns:
        The weights ``[..., experts]`` in the logits' dtype, 0 for experts that are not chosen; and the routing map.

    Raises:
        ArgumentTypeError: no tensors.
        ArgumentError: numbers that do not fit each other, another dtype, a bias with "softmax".
        UnsupportedError: quantile balancing.
    """
    where = "fused_topk_with_score_function"
    given = {"qb_histogram": qb_histogram, "qb_bin_bounds": qb_bin_bounds, "qb_histogram_mode": qb_histogram_mode}
    refuse(where, given, _QB)
    check_flags(where, {"use_pre_softmax": use_pre_softmax})
    _check_logits(where, logits, topk, score_function)
    experts = logits.shape[-1]
    written = checked_format(where, routing_map_format)
    _check_groups(where, experts, topk, num_groups, group_topk)
    _check_bias(where, expert_bias, score_function, logits)
    if topk_indices is not None:
        check_integers(f"{where}: topk_indices", topk_indices, (*logits.shape[:-1], topk), logits.device)
    weights, chosen = weights_and_choice(
        logits.float(), topk, (num_groups, group_topk), score_function, expert_bias, softmax_first=use_pre_softmax
    )
    if scaling_factor is not None:
        weights = weights * check_number(f"{where}: scaling_factor", scaling_factor)
    probs = torch.zeros_like(logits, dtype=weights.dtype).scatter(-1, chosen, weights).to(logits.dtype)
    if topk_indices is not None:
        return probs, topk_indices.copy_(chosen)
    return probs, routing_map(chosen, experts, written)


def weights_and_choice(
    logits: torch.Tensor,
    topk: int,
    groups: tuple[int | None, int | None],
    score_function: str,
    expert_bias: torch.Tensor | None,
    *,
    softmax_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[..., topk]`` and numbers of the chosen experts, in the dtype of the logits; arguments as above."""
    if score_function == "softmax":
        scores = logits.softmax(dim=-1) if softmax_first else logits
        chosen = best(scores.detach(), topk, *groups)
        picked = scores.gather(-1, chosen)
        return (picked if softmax_first else picked.softmax(dim=-1)), chosen
    scores = SCORES[score_function](logits)
    biased = scores.detach() if expert_bias is None else scores.detach() + expert_bias.detach().to(scores.dtype)
    chosen = best(biased, topk, *groups)
    return shares(scores.gather(-1, chosen), topk), chosen


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | str | int = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of all experts for the balancing loss, and the choice that they alone would make.

    Args:
        logits: ``[..., experts]`` in fp32, bf16 or fp16.
        topk: experts per token.
        score_function: as in :func:`fused_topk_with_score_function`.
        routing_map_format: how the map is written.

    Returns:
        The routing map; fp32 scores ``[..., experts]``: softmax, or shares of the sum over all experts (the scores
        themselves where ``topk`` is 1).

    Raises:
        ArgumentTypeError: no tensor.
        ArgumentError: a number that does not fit, another dtype.
    """
    where = "fused_compute_score_for_moe_aux_loss"
    _check_logits(where, logits, topk, score_function)
    written = checked_format(where, routing_map_format)
    scores = aux_scores(logits.float(), topk, score_function)
    return routing_map(best(scores.detach(), topk), logits.shape[-1], written), scores


def aux_scores(logits: torch.Tensor, topk: int, score_function: str) -> torch.Tensor:
    """Scores of all experts in the dtype of the logits; arguments as above."""
    if score_function == "softmax":
        return logits.softmax(dim=-1)
    return shares(SCORES[score_function](logits), topk)


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """The loss that is least where tokens are spread evenly over experts.

    ``coeff * experts / (topk * total_num_tokens ** 2) * sum over experts of (sum of its probs) * (its tokens)``.

    Args:
        probs: ``[tokens, experts]`` in fp32, bf16 or fp16.
        tokens_per_expert: numbers ``[experts]``; get no gradient.
        total_num_tokens: an int, or a tensor of one integer.
        num_experts: of the whole model, where ``probs`` has a part of them.
        topk: experts per token.
        coeff: of the loss.

    Returns:
        One number in the dtype of ``probs``, computed in fp32.

    Raises:
        ArgumentTypeError: no tensors.
        ArgumentError: shapes, dtypes or numbers that do not fit.
    """
    where = "fused_moe_aux_loss"
    check_tensor(f"{where}: probs", probs)
    check_tensor(f"{where}: tokens_per_expert", tokens_per_expert)
    if probs.dim() != 2 or probs.dtype not in FLOATS or tokens_per_expert.shape != probs.shape[1:]:  # noqa: PLR2004
        raise ArgumentError(
            where,
            got=f"probs {tuple(probs.shape)} of {probs.dtype}, tokens_per_expert {tuple(tokens_per_expert.shape)}",
            accepted=f"[tokens, experts] in {', '.join(map(str, FLOATS))}, and [experts]",
            todo="correct them",
        )
    check_size(f"{where}: num_experts", num_experts)
    check_size(f"{where}: topk", topk)
    if not isinstance(total_num_tokens, torch.Tensor):
        check_size(f"{where}: total_num_tokens", total_num_tokens)
    elif total_num_tokens.numel() != 1 or total_num_tokens.is_floating_point():
        got = f"shape {tuple(total_num_tokens.shape)} of {total_num_tokens.dtype}"
        accepted = "an int, or a tensor of one integer"
        raise ArgumentError(f"{where}: total_num_tokens", got=got, accepted=accepted, todo="correct it")
    sums = (probs.float().sum(dim=0) * tokens_per_expert.detach().to(probs.device, torch.float32)).sum()
    factor = num_experts * check_number(f"{where}: coeff", coeff) / topk
    return (sums * factor / total_num_tokens / total_num_tokens).to(probs.dtype)


def _check_logits(where: str, logits: object, topk: object, score_function: object) -> None:
    logits = check_tensor(where, logits)
    if not logits.dim() or logits.dtype not in FLOATS:
        raise ArgumentError(
            f"{where}: logits",
            got=f"shape {tuple(logits.shape)} of {logits.dtype}",
            accepted=f"[..., experts] in {', '.join(map(str, FLOATS))}",
            todo="cast them: everything is computed in float32 anyway",
        )
    check_size(f"{where}: topk", topk)
    if topk > logits.shape[-1]:  # type: ignore[operator] # an int
        got, accepted = f"{topk} of {logits.shape[-1]} experts", "at most all of them"
        raise ArgumentError(f"{where}: topk", got=got, accepted=accepted, todo="choose fewer")
    if score_function not in SCORE_FUNCTIONS:
        accepted = ", ".join(map(repr, SCORE_FUNCTIONS))
        raise ArgumentError(f"{where}: score_function", got=repr(score_function), accepted=accepted, todo="choose one")


def _check_groups(where: str, experts: int, topk: int, num_groups: int | None, group_topk: int | None) -> None:
    """Groups of equal size, of which a choice of ``topk`` fits into ``group_topk``."""
    if num_groups is None and group_topk is None:
        return
    if (
        _is_count(num_groups)
        and _is_count(group_topk)
        and experts % num_groups == 0
        and group_topk <= num_groups
        and group_topk <= topk <= group_topk * (experts // num_groups)
    ):
        return
    raise ArgumentError(
        f"{where}: num_groups, group_topk",
        got=f"num_groups={num_groups!r}, group_topk={group_topk!r} for {experts} experts, topk={topk}",
        accepted="both or neither; groups of equal size; group_topk of them at most, and no more than topk, which have "
        "room for topk experts",
        todo="correct them",
    )


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _check_bias(where: str, expert_bias: object, score_function: str, logits: torch.Tensor) -> None:
    if expert_bias is None:
        return
    bias = check_tensor(f"{where}: expert_bias", expert_bias)
    fits = bias.shape == logits.shape[-1:] and bias.is_floating_point() and bias.device == logits.device
    if fits and score_function != "softmax":
        return
    raise ArgumentError(
        f"{where}: expert_bias",
        got=f"shape {tuple(bias.shape)} of {bias.dtype} on {bias.device} with {score_function!r}",
        accepted=f"[{logits.shape[-1]}] of a floating dtype on {logits.device} with "
        f"{' or '.join(map(repr, SCORES))}; None",
        todo="leave it out, correct it, or choose another score_function",
    )
