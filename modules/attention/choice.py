"""Which implementation computes attention, and why: decided per kind of call, before anything is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import backend_for, current_memo, resolve
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
        masked: whether a mask tensor hides keys.
        square: as many queries as keys.
        empty: no queries or no keys at all.
        always_written_out: the user's wish.
    """

    dtype: torch.dtype
    device: torch.device
    causal: str
    masked: bool
    square: bool
    empty: bool
    always_written_out: bool


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
        choice = Choice(TORCH, "torch's kernels compute the same thing and keep no scores", kernels)
        return AttentionPlan(key, memo, choice, None, None)
    scores = torch.float32
    forward: dict[str, Kind] = {"input": scores, "mask": torch.bool if key.masked else None}
    backward: dict[str, Kind] = {"grad_output": scores, "output": key.dtype}
    flags = {"causal": key.causal, "out_dtype": key.dtype}
    return AttentionPlan(
        key,
        memo,
        Choice(WRITTEN_OUT, reason),
        resolve(Call("softmax_fwd", key.device, forward, flags)).kernel,
        resolve(Call("softmax_bwd", key.device, backward)).kernel,
    )


def _why_written_out(key: AttentionKey) -> str | None:
    """What torch's kernels would do otherwise; None: nothing."""
    if key.always_written_out:
        return "always_written_out is set"
    if key.empty:
        return "there are no queries or no keys, which torch's kernels do not define"
    if key.masked:
        return "a mask may leave a query without keys: its result is 0, while torch's kernels give NaN or 0 by version"
    if key.causal == "bottom_right" and not key.square:
        return "torch's kernels align the causal mask top left, which differs where queries and keys are not as many"
    return None
