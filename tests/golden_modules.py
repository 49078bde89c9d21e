"""The recorded steps of modules (tests/golden/README.md), run again on any device, under any backend."""

from __future__ import annotations

from typing import Any

import golden_values
import torch

import te_hal.modules as te
from te_hal import recipe

RECIPES = {
    "none": None,
    "delayed_hybrid_max": recipe.DelayedScaling(
        fp8_format=recipe.Format.HYBRID, amax_history_len=4, amax_compute_algo="max"
    ),
    "delayed_e4m3_recent": recipe.DelayedScaling(
        margin=1, fp8_format=recipe.Format.E4M3, amax_history_len=2, amax_compute_algo="most_recent"
    ),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}

MODULES = {
    "Linear": lambda dtype, device: te.Linear(128, 256, params_dtype=dtype, device=device),
    "LayerNormLinear": lambda dtype, device: te.LayerNormLinear(128, 256, params_dtype=dtype, device=device),
    "LayerNormMLP_gelu": lambda dtype, device: te.LayerNormMLP(128, 256, params_dtype=dtype, device=device),
    "TransformerLayer": lambda dtype, device: te.TransformerLayer(
        *(128, 256, 4),
        self_attn_mask_type="causal",
        fuse_qkv_params=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        device=device,
    ),
    "LayerNorm": lambda dtype, device: te.LayerNorm(128, dtype=dtype, device=device),
    "RMSNorm": lambda dtype, device: te.RMSNorm(128, dtype=dtype, device=device),
}

#: Bounds on norm(out - ref) / norm(ref), from the golden values' README.
BOUNDS = {
    ("bfloat16", "fp8"): 1.5e-3,
    ("float32", "fp8"): 3e-4,
    ("bfloat16", "none"): 1e-3,
    ("float32", "none"): 6e-4,
}
#: Of a bias whose gradient is the sum of the one that the module gets.
BIAS_GRADIENT = 1e-3
OWN_BIASES = ("bias", "fc2_bias", "layernorm_mlp.fc2_bias")
#: Gradients of gamma and beta, which the README gives no bound for: sums over rows in which much cancels, of a gradient
#: that is within the bound above and was rounded to bf16 element by element.
NORM_GRADIENT = 2.5e-3
#: Of y and of gradients, under FP8, where a product follows a product.
FARTHER = {"LayerNormMLP_gelu": (6e-3, 2e-2), "TransformerLayer": (8e-3, 5e-2)}
#: Of everything without FP8.
LAYER_BOUND = 3e-3

#: The largest share of the reference's own distance between a recipe and none, of y and of gradients.
SHARES = {"LayerNormMLP_gelu": (1 / 5, 1 / 3), "TransformerLayer": (3 / 4, 3 / 4)}
SHARE = (1 / 5, 1 / 5)

#: Relative distances allowed to scaling state that is not exact. Behind a norm: two units in the last place
#: (docs/numerics.md, N1). Behind another gemm: one step of bf16; behind several and attention: two.
BEHIND_NORM, BEHIND_GEMM, BEHIND_ATTENTION = 2.0**-22, 2.0**-7, 2.0**-6

#: Slots of scaling state that are not exact, by module and key.
STATE_BOUNDS = {
    ("LayerNormLinear", "self/scaling_fwd"): {0: BEHIND_NORM},
    ("LayerNormMLP_gelu", "self/scaling_fwd"): {0: BEHIND_NORM, 3: BEHIND_GEMM},
    ("LayerNormMLP_gelu", "self/scaling_bwd"): {0: BEHIND_GEMM},
    ("TransformerLayer", "self_attention.layernorm_qkv/scaling_fwd"): {0: BEHIND_NORM},
    ("TransformerLayer", "self_attention.layernorm_qkv/scaling_bwd"): {0: BEHIND_ATTENTION},
    ("TransformerLayer", "self_attention.proj/scaling_fwd"): {0: BEHIND_ATTENTION},
    ("TransformerLayer", "self_attention.proj/scaling_bwd"): {0: BEHIND_ATTENTION},
    ("TransformerLayer", "layernorm_mlp/scaling_fwd"): {0: BEHIND_ATTENTION, 3: BEHIND_ATTENTION},
    ("TransformerLayer", "layernorm_mlp/scaling_bwd"): {0: BEHIND_ATTENTION},
}

CASES = [
    ("Linear", "bfloat16", "none"),
    ("Linear", "bfloat16", "delayed_hybrid_max"),
    ("Linear", "bfloat16", "delayed_e4m3_recent"),
    ("Linear", "bfloat16", "current"),
    ("Linear", "bfloat16", "block"),
    ("Linear", "float32", "none"),
    ("Linear", "float32", "delayed_hybrid_max"),
    ("Linear", "float32", "current"),
    ("LayerNormLinear", "bfloat16", "none"),
    ("LayerNormLinear", "bfloat16", "delayed_hybrid_max"),
    ("LayerNormLinear", "bfloat16", "delayed_e4m3_recent"),
    ("LayerNormLinear", "bfloat16", "current"),
    ("LayerNormLinear", "bfloat16", "block"),
    ("LayerNormLinear", "float32", "none"),
    ("LayerNormLinear", "float32", "delayed_hybrid_max"),
    ("LayerNormLinear", "float32", "current"),
    ("LayerNormMLP_gelu", "bfloat16", "none"),
    ("LayerNormMLP_gelu", "bfloat16", "delayed_hybrid_max"),
    ("LayerNormMLP_gelu", "bfloat16", "delayed_e4m3_recent"),
    ("LayerNormMLP_gelu", "bfloat16", "current"),
    ("LayerNormMLP_gelu", "bfloat16", "block"),
    ("TransformerLayer", "bfloat16", "none"),
    ("TransformerLayer", "bfloat16", "delayed_hybrid_max"),
    ("TransformerLayer", "bfloat16", "delayed_e4m3_recent"),
    ("TransformerLayer", "bfloat16", "current"),
    ("TransformerLayer", "bfloat16", "block"),
    ("LayerNorm", "bfloat16", "none"),
    ("RMSNorm", "bfloat16", "none"),
]


def distance(out: torch.Tensor, ref: torch.Tensor) -> float:
    """``norm(out - ref) / norm(ref)``."""
    return float((out.double() - ref.double()).norm() / ref.double().norm())


def run(module_name: str, dtype: str, recipe_name: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Three forward/backward steps on the recorded inputs; results under the recorded keys, on the CPU.

    Each step starts from the recorded scaling state: an amax behind a gemm may be one step of bf16 off, and with it
    every code of the next step.
    """
    values = golden_values.load(f"modules_{'bf16' if dtype == 'bfloat16' else 'fp32'}").case(
        f"{module_name}/{dtype}/{recipe_name}"
    )
    module = MODULES[module_name](getattr(torch, dtype), device)
    weights = {key[len("param/") :]: value for key, value in values.items() if key.startswith("param/")}
    module.load_state_dict(weights, strict=True)
    chosen = RECIPES[recipe_name]
    found = {}
    for step in range(3):
        module.zero_grad(set_to_none=True)
        x = values[f"step{step}/x"].clone().to(device).requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        y.backward(values[f"step{step}/gy"].to(device))
        found[f"step{step}/y"], found[f"step{step}/gx"] = y.detach(), x.grad
        for key, state in _states(module):
            for name in ("scale", "amax_history"):
                found[f"step{step}/meta/{key}/{name}"] = getattr(state, name).clone()
                getattr(state, name).copy_(values[f"step{step}/meta/{key}/{name}"])
    for name, parameter in module.named_parameters():
        found[f"step2/grad/{name}"] = parameter.grad
    found = {key: value.cpu() for key, value in found.items()}
    return found | {f"ref/{key}": value for key, value in values.items()}


def _states(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """The delayed-scaling states of a module and those in it, as the recorded keys call them."""
    return [
        (f"{name or 'self'}/{direction}", state)
        for name, part in module.named_modules()
        for direction in ("scaling_fwd", "scaling_bwd")
        if hasattr(state := getattr(part, "fp8_meta", {}).get(direction), "scale")
    ]


def bound_of(module_name: str, key: str, dtype: str, recipe_name: str) -> float:
    """The bound on the distance of a result."""
    name, fp8 = key.rpartition("/")[2], recipe_name != "none"
    if "grad/" in key and name in OWN_BIASES:
        return BIAS_GRADIENT
    if fp8 and module_name in FARTHER:
        return FARTHER[module_name][0 if name == "y" else 1]
    if module_name == "TransformerLayer":
        return LAYER_BOUND
    if "grad/layer_norm" in key and dtype == "bfloat16":
        return NORM_GRADIENT
    return BOUNDS[dtype, "fp8" if fp8 else "none"]


def share_of(module_name: str, key: str) -> float:
    """How far a result may lie from the recorded one, as a share of what quantizing changed in the recording."""
    return SHARES.get(module_name, SHARE)[0 if key.endswith("/y") else 1]


def state_agrees(module_name: str, key: str, found: torch.Tensor, recorded: torch.Tensor) -> bool:
    """Whether scaling state is the recorded one, in every slot that can be."""
    bounds = STATE_BOUNDS.get((module_name, "/".join(key.split("/")[-3:-1])), {})
    slots = ((found[..., slot], recorded[..., slot], bounds.get(slot, 0.0)) for slot in range(found.shape[-1]))
    return all(bool(((value - ref).abs() <= bound * ref.abs()).all()) for value, ref, bound in slots)


def compared(found: dict[str, torch.Tensor]) -> list[str]:
    """The keys of results that were recorded."""
    return [
        key[len("ref/") :] for key in found if key.startswith("ref/step") and key.rpartition("/")[2] not in ("x", "gy")
    ]
