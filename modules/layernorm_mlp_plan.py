"""LayerNormMLPPlan: what LayerNormMLP runs, decided once per recipe, dtypes and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import current_memo
from te_hal.modules.activation_stage import ActivationKey, casts_gradient, make_activation_stage
from te_hal.modules.norm_stage import make_norm_stage
from te_hal.modules.plan import make_plan
from te_hal.modules.plan_key import plan_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.modules.activation_stage import ActivationStage
    from te_hal.modules.norm_function import NormKey
    from te_hal.modules.norm_stage import NormStage
    from te_hal.modules.plan import LinearPlan
    from te_hal.modules.plan_key import PlanKey
    from te_hal.quantization.operand_formats import Formats


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


def layernorm_mlp_key(
    formats: Mapping[str, Formats] | None,
    inp: torch.Tensor,
    given: Mapping[str, Any],
    main_grads: Mapping[str, torch.dtype | None],
    norm: NormKey,
    activation: tuple[str, tuple[tuple[str, float], ...]],
    *,
    quantizes_norm: bool,
) -> LayerNormMLPKey:
    """Describe a call.

    Args:
        formats: what operands become, by product; None without FP8.
        inp: in the activation dtype.
        given: parameters by name, in the activation dtype; None for a bias that no product adds.
        main_grads: by product, the dtype of the tensor that wgrad writes to; None where autograd gets the gradient.
        norm: the norm.
        activation: its name and parameters.
        quantizes_norm: under FP8 the norm quantizes its result.
    """
    bias, dtype, name = given["fc1_bias"], given["fc1_weight"].dtype, activation[0]
    of_norm = any(map(needs_gradient, (inp, given["layer_norm_weight"], given["layer_norm_bias"])))
    # docs/numerics.md, F4; in fp32 the product's own bias is the same sum.
    later = formats is None and bias is not None and name == "gelu" and dtype != torch.float32
    bias_grad = torch.is_grad_enabled() and needs_gradient(bias)
    fc1 = plan_key(
        formats["fc1"] if formats else None,
        inp,
        given["fc1_weight"],
        None if later else bias,
        needs_dgrad=of_norm,
        input_is_quantized=quantizes_norm,
        main_grad_dtype=main_grads["fc1"],
    )
    fc1 = fc1._replace(bias_grad=bias_grad and not later)
    fc1 = fc1._replace(grad_is_quantized=casts_gradient(fc1.format_of("grad_output")))
    fc2 = plan_key(
        formats["fc2"] if formats else None,
        inp,
        given["fc2_weight"],
        given["fc2_bias"],
        needs_dgrad=of_norm or needs_gradient(given["fc1_weight"]) or needs_gradient(bias),
        input_is_quantized=True,
        main_grad_dtype=main_grads["fc2"],
    )
    return LayerNormMLPKey(norm, fc1, ActivationKey(*activation, dtype, inp.device, later, later and bias_grad), fc2)


def needs_gradient(tensor: torch.Tensor | None) -> bool:
    """Whether there is one that needs a gradient."""
    return tensor is not None and tensor.requires_grad


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
