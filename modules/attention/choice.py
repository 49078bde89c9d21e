"""Which implementation computes attention, and why: decided per kind of call, before anything is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import backend_for, current_memo, is_deterministic, resolve
from te_hal.modules.attention.bias import NO_BIAS
from te_hal.modules.attention.softmax_type import VANILLA
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from te_hal.schema.support import Kind

TORCH, WRITTEN_OUT = "torch", "written_out"


class Choice(NamedTuple):
    """The answer to "what computes this?".

    Attributes:
        implementation: ``"torch"`` (scaled_dot_product_attention) or ``"written_out"`` (two products around the
            backend's softmax).
        reason: why, as a sentence.
        kernels: of torch's implementation, the kernels that the backend asks for, by their names in
            torch.nn.attention.SDPBackend, most wanted first; empty: torch's own order.
    """

    implementation: str
    reason: str
    kernels: tuple[str, ...] = ()


class AttentionKey(NamedTuple):
    """Everything the choice and its kernels depend on, the selection of the backend aside.

    Attributes:
        dtype: of queries, keys and values.
        device: theirs.
        causal: as softmax_fwd has it.
        windowed: keys are hidden that are far from the query, or a diagonal is in force that torch does not know.
        masked: whether a mask tensor hides keys, that of packed sequences aside.
        mask_tensor: whether softmax_fwd gets a mask tensor, which may hold the window, too.
        window_in_tensor: of it: no arguments of softmax_fwd say the same as the window and its diagonal, or something
            looks at the scores that would not be hidden by them.
        sees_something: every query is known to see a key. One that sees none gives 0, but NaN or 0 by version in
            torch's kernels: they get it with every key to see, and it is set to 0 behind them.
        empty: no queries or no keys at all.
        packed: sequences lie in one row of tokens.
        bias: type of the bias.
        softmax_type: of softmax_type.TYPES.
        tells_largest: the largest score is asked for.
        always_written_out: the user's wish.
    """

    dtype: torch.dtype
    device: torch.device
    causal: str
    windowed: bool
    masked: bool
    mask_tensor: bool
    window_in_tensor: bool
    sees_something: bool
    empty: bool
    packed: bool = False
    bias: str = NO_BIAS
    softmax_type: str = VANILLA
    tells_largest: bool = False
    always_written_out: bool = False


class AttentionPlan(NamedTuple):
    """What runs; ``memo`` is dispatch's memo when it was chosen. The kernels are None where torch computes."""

    key: AttentionKey
    memo: object
    choice: Choice
    softmax_fwd: Any
    softmax_bwd: Any


def make_plan(key: AttentionKey) -> AttentionPlan:
    """Choose, and bind the kernels that the choice needs.

    Raises:
        BackendNotFoundError, BackendUnavailableError: no backend can be chosen for this device.
        UnsupportedError: the written-out form is chosen, and the backend, and every fallback that the policy lists,
            lacks its softmax.
    """
    memo = current_memo()
    reason = _why_written_out(key)
    if reason is None:
        kernels = backend_for(key.device).sdpa_kernels
        return AttentionPlan(key, memo, Choice(TORCH, _why_torch(key), kernels), None, None)
    scores = torch.float32
    forward: dict[str, Kind] = {"input": scores, "mask": torch.bool if key.mask_tensor else None}
    backward: dict[str, Kind] = {"grad_output": scores, "output": key.dtype}
    flags = {"causal": key.causal, "out_dtype": key.dtype}
    return AttentionPlan(
        key,
        memo,
        Choice(WRITTEN_OUT, reason),
        resolve(Call("softmax_fwd", key.device, forward, flags)).kernel,
        resolve(Call("softmax_bwd", key.device, backward, {"causal": key.causal})).kernel,
    )


def _why_torch(key: AttentionKey) -> str:
    same = "torch's kernels compute the same thing and keep no scores"
    if key.packed and not key.windowed:
        return f"{same}, sequence by sequence"
    if key.masked or key.windowed:
        zeros = "" if key.sees_something else "; queries that see no key are set to 0 behind them"
        return f"{same}, under a mask tensor{zeros}"
    return same


def _why_written_out(key: AttentionKey) -> str | None:
    """What torch's kernels would do otherwise, the first reason of several; None: nothing."""
    adds = f"softmax_type {key.softmax_type!r} adds to the sum under the softmax, which torch's kernels do not"
    reasons = (
        (key.always_written_out, "always_written_out is set"),
        (
            is_deterministic() and key.device.type != "cpu",
            "set_deterministic is on, and torch's kernels on a device may add the parts of a gradient in any order",
        ),
        (key.empty, "there are no queries or no keys, which torch's kernels do not define"),
        (key.tells_largest, "return_max_logit asks for the largest score, which torch's kernels do not tell"),
        (key.softmax_type != VANILLA, adds),
        (key.bias != NO_BIAS, f"{key.bias} is added in fp32 and may need a gradient, which not all of torch's can"),
    )
    return next((reason for holds, reason in reasons if holds), None)
