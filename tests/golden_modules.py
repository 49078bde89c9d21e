"""The recorded steps of modules (tests/golden/README.md), run again on any device, under any backend."""

from __future__ import annotations

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
}

MODULES = {
    "Linear": lambda dtype, device: te.Linear(128, 256, params_dtype=dtype, device=device),
    "LayerNormLinear": lambda dtype, device: te.LayerNormLinear(128, 256, params_dtype=dtype, device=device),
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
BIAS_GRADIENT = 1e-3
#: Gradients of gamma and beta, which the README gives no bound for: sums over rows in which much cancels, of a gradient
#: that is within the bound above and was rounded to bf16 element by element.
NORM_GRADIENT = 2.5e-3

#: Slots of scaling state that are not exact, by module and key: the relative distance allowed. Behind a norm two units
#: in the last place (docs/numerics.md, N1).
STATE_BOUNDS = {("LayerNormLinear", "scaling_fwd"): {0: 2.0**-22}}

CASES = [
    ("Linear", "bfloat16", "none"),
    ("Linear", "bfloat16", "delayed_hybrid_max"),
    ("Linear", "bfloat16", "delayed_e4m3_recent"),
    ("Linear", "bfloat16", "current"),
    ("Linear", "float32", "none"),
    ("Linear", "float32", "delayed_hybrid_max"),
    ("Linear", "float32", "current"),
    ("LayerNormLinear", "bfloat16", "none"),
    ("LayerNormLinear", "bfloat16", "delayed_hybrid_max"),
    ("LayerNormLinear", "bfloat16", "delayed_e4m3_recent"),
    ("LayerNormLinear", "bfloat16", "current"),
    ("LayerNormLinear", "float32", "none"),
    ("LayerNormLinear", "float32", "delayed_hybrid_max"),
    ("LayerNormLinear", "float32", "current"),
    ("LayerNorm", "bfloat16", "none"),
    ("RMSNorm", "bfloat16", "none"),
]


def distance(out: torch.Tensor, ref: torch.Tensor) -> float:
    """``norm(out - ref) / norm(ref)``."""
    return float((out.double() - ref.double()).norm() / ref.double().norm())


def run(module_name: str, dtype: str, recipe_name: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Three forward/backward steps on the recorded inputs; results under the recorded keys, on the CPU."""
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
        for direction in ("scaling_fwd", "scaling_bwd"):
            state = getattr(module, "fp8_meta", {}).get(direction)
            if hasattr(state, "scale"):
                found[f"step{step}/meta/self/{direction}/scale"] = state.scale.clone()
                found[f"step{step}/meta/self/{direction}/amax_history"] = state.amax_history.clone()
    for name, parameter in module.named_parameters():
        found[f"step2/grad/{name}"] = parameter.grad
    found = {key: value.cpu() for key, value in found.items()}
    return found | {f"ref/{key}": value for key, value in values.items()}


def bound_of(key: str, dtype: str, recipe_name: str) -> float:
    """The bound on the distance of a result."""
    if key.endswith("bias") and "layer_norm" not in key:
        return BIAS_GRADIENT
    if "grad/layer_norm" in key and dtype == "bfloat16":
        return NORM_GRADIENT
    return BOUNDS[dtype, "none" if recipe_name == "none" else "fp8"]


def state_bounds(module_name: str, key: str) -> dict[int, float]:
    """Of the state under a key: slots that are not exact, and how far they may lie, relative to their value."""
    return STATE_BOUNDS.get((module_name, key.split("/")[-2]), {})


def compared(found: dict[str, torch.Tensor]) -> list[str]:
    """The keys of results that were recorded."""
    return [
        key[len("ref/") :] for key in found if key.startswith("ref/step") and key.rpartition("/")[2] not in ("x", "gy")
    ]
