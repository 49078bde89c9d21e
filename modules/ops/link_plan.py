"""LinkPlan: what the ops of a link run, decided once per recipe, dtypes and device; what te_hal.explain shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from te_hal.dispatch import backend_for, current_memo, resolve
from te_hal.modules.activation_stage import ActivationKey, make_activation_stage
from te_hal.modules.norm_function import NormKey
from te_hal.modules.norm_stage import make_norm_stage
from te_hal.modules.plan import make_plan
from te_hal.quantization.linear_calls import LinearCopies, linear_copies
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.modules.activation_stage import ActivationStage
    from te_hal.modules.norm_stage import NormStage
    from te_hal.modules.plan import LinearPlan
    from te_hal.modules.plan_key import PlanKey
    from te_hal.schema.formats import ColumnwiseOrder


class LinkKey(NamedTuple):
    """What decides what a link runs, the selection aside.

    Attributes:
        front: a norm, an activation, or None.
        before: of an activation: the product of the link before, whose gradient its backward gives; None without one.
        linear: the product; its bias is none of it where ``adds_bias``.
        adds_bias: bias and an extra input are added to its result in one pass.
    """

    front: NormKey | ActivationKey | None
    before: PlanKey | None
    linear: PlanKey
    adds_bias: bool


class LinkPlan(NamedTuple):
    """What a link runs; ``memo`` is dispatch's memo when it was bound."""

    key: LinkKey
    memo: object
    front: NormStage | ActivationStage | None
    linear: LinearPlan
    bias_residual: Callable[..., Any] | None


class _Before(NamedTuple):
    """The product before an activation, as far as that must know it."""

    key: PlanKey
    copies: LinearCopies
    order: ColumnwiseOrder


def make_link_plan(key: LinkKey) -> LinkPlan:
    """Ask for every kernel that the link will run.

    Raises:
        UnsupportedError: the backend, and every fallback that the policy lists, says no to one of them.
        BackendUnavailableError: no backend for the device.
    """
    memo = current_memo()
    linear = make_plan(key.linear)
    front: NormStage | ActivationStage | None = None
    if isinstance(key.front, NormKey):
        front = make_norm_stage(key.front, linear)
    elif key.front is not None:
        front = make_activation_stage(key.front, _before(key.before), linear)
    bias_residual = None
    if key.adds_bias:
        kinds = dict.fromkeys(("input", "bias", "residual"), key.linear.dtype)
        bias_residual = resolve(Call("bias_residual", key.linear.device, kinds)).kernel
    return LinkPlan(key, memo, front, linear, bias_residual)


def _before(key: PlanKey | None) -> _Before | None:
    """Nothing is bound for it here: its own link does."""
    if key is None:
        return None
    backend, copies = backend_for(key.device, "gemm"), LinearCopies()
    if key.formats is not None:
        copies = linear_copies(backend.gemm_copies, key.formats, dgrad=key.dgrad, wgrad=key.wgrad)
    return _Before(key, copies, backend.columnwise_order)
