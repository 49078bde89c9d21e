"""Modules against what Transformer Engine computed on an H200 (tests/golden/README.md)."""

from __future__ import annotations

import golden_values
import pytest
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
    "Linear": lambda dtype: te.Linear(128, 256, params_dtype=dtype),
    "LayerNorm": lambda dtype: te.LayerNorm(128, dtype=dtype),
    "RMSNorm": lambda dtype: te.RMSNorm(128, dtype=dtype),
}

#: Bounds on norm(out - ref) / norm(ref), from the golden values' README.
BOUNDS = {
    ("bfloat16", "fp8"): 1.5e-3,
    ("float32", "fp8"): 3e-4,
    ("bfloat16", "none"): 1e-3,
    ("float32", "none"): 6e-4,
}
BIAS_GRADIENT = 1e-3

CASES = [
    ("Linear", "bfloat16", "none"),
    ("Linear", "bfloat16", "delayed_hybrid_max"),
    ("Linear", "bfloat16", "delayed_e4m3_recent"),
    ("Linear", "bfloat16", "current"),
    ("Linear", "float32", "none"),
    ("Linear", "float32", "delayed_hybrid_max"),
    ("Linear", "float32", "current"),
    ("LayerNorm", "bfloat16", "none"),
    ("RMSNorm", "bfloat16", "none"),
]


def distance(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref.double()).norm() / ref.double().norm())


def run(module_name: str, dtype: str, recipe_name: str) -> dict[str, torch.Tensor]:
    """Three forward/backward steps on the recorded inputs; results under the recorded keys."""
    values = golden_values.load(f"modules_{'bf16' if dtype == 'bfloat16' else 'fp32'}").case(
        f"{module_name}/{dtype}/{recipe_name}"
    )
    module = MODULES[module_name](getattr(torch, dtype))
    weights = {key[len("param/") :]: value for key, value in values.items() if key.startswith("param/")}
    module.load_state_dict(weights, strict=True)
    chosen = RECIPES[recipe_name]
    found = {}
    for step in range(3):
        module.zero_grad(set_to_none=True)
        x = values[f"step{step}/x"].clone().requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        y.backward(values[f"step{step}/gy"])
        found[f"step{step}/y"], found[f"step{step}/gx"] = y.detach(), x.grad
        for direction in ("scaling_fwd", "scaling_bwd"):
            state = getattr(module, "fp8_meta", {}).get(direction)
            if hasattr(state, "scale"):
                found[f"step{step}/meta/self/{direction}/scale"] = state.scale.clone()
                found[f"step{step}/meta/self/{direction}/amax_history"] = state.amax_history.clone()
    for name, parameter in module.named_parameters():
        found[f"step2/grad/{name}"] = parameter.grad
    return found | {f"ref/{key}": value for key, value in values.items()}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[tuple[str, str, str], dict[str, torch.Tensor]]:
    return request.param, run(*request.param)


FP8_CASES = pytest.mark.parametrize(
    "case", [names for names in CASES if names[2] != "none"], ids="-".join, indirect=True
)


def compared(found: dict[str, torch.Tensor]) -> list[str]:
    return [
        key[len("ref/") :] for key in found if key.startswith("ref/step") and key.rpartition("/")[2] not in ("x", "gy")
    ]


def test_outputs_and_gradients_lie_within_the_recorded_bounds(case):
    (_, dtype, recipe_name), found = case
    bound = BOUNDS[dtype, "none" if recipe_name == "none" else "fp8"]
    keys = [key for key in compared(found) if "meta" not in key]
    assert len(keys) >= 7
    for key in keys:
        limit = BIAS_GRADIENT if key.endswith("grad/bias") else bound
        assert distance(found[key], found[f"ref/{key}"]) <= limit, key


def test_every_recorded_state_is_reproduced_exactly(case):
    (_, _, recipe_name), found = case
    keys = [key for key in compared(found) if "meta" in key]
    assert len(keys) == (12 if recipe_name.startswith("delayed") else 0)
    for key in keys:
        assert torch.equal(found[key], found[f"ref/{key}"]), key


@FP8_CASES
def test_fp8_results_stand_far_closer_to_the_reference_than_the_unquantized_ones(case):
    (module_name, dtype, _), found = case
    values = golden_values.load(f"modules_{'bf16' if dtype == 'bfloat16' else 'fp32'}")
    for key in [k for k in compared(found) if "meta" not in k and not k.endswith("grad/bias")]:
        unquantized = values[f"{module_name}/{dtype}/none/{key}"]
        quantization = distance(unquantized, found[f"ref/{key}"])
        assert quantization > 0.01
        assert distance(found[key], found[f"ref/{key}"]) <= quantization / 5, key
