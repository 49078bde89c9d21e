"""LayerNormMLPPlan: what LayerNormMLP runs, decided once per recipe, dtypes and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from te_hal.dispatch import current_memo
from te_hal.modules.activation_stage import make_activation_stage
from te_hal.modules.norm_stage import make_norm_stage
from te_hal.modules.plan import make_plan

if TYPE_CHECKING:
    from te_hal.modules.activation_stage import ActivationKey, ActivationStage
    from te_hal.modules.norm_function import NormKey
    from te_hal.modules.norm_stage import NormStage
    from te_hal.modules.plan import LinearPlan
    from te_hal.modules.plan_key import PlanKey


class LayerNormMLPKey(NamedTuple):
    """What decides what a call runs, the selection aside."""

    norm: NormKey
    fc1: PlanKey
    activation: ActivationKey
    fc2: PlanKey


class LayerNormMLPPlan(NamedTuple):
    """What a call runs; ``memo`` is dispatch's memo when it was bound."""

    key: LayerNormMLPKey
    memo: object
    norm: NormStage
    fc1: LinearPlan
    activation: ActivationStage
    fc2: LinearPlan


def make_layernorm_mlp_plan(key: LayerNormMLPKey) -> LayerNormMLPPlan:
    """Ask for every kernel that the layer will run.

    Raises:
        UnsupportedError: the backend, and every fallback that the policy lists, says no to one of them.
        BackendUnavailableError: no backend for the device.
    """
    memo = current_memo()
    fc1, fc2 = make_plan(key.fc1), make_plan(key.fc2)
    activation = make_activation_stage(key.activation, fc1, fc2)
    return LayerNormMLPPlan(key, memo, make_norm_stage(key.norm, fc1), fc1, activation, fc2)
