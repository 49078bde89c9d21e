"""What each recipe costs in accuracy: relative errors of one bf16 Linear's three products, in one run.

    python benchmarks/recipe_error.py [--features 512] [--rows 1024] [--steps 3] [--backend cpu_reference]

An error is ``norm(result - exact) / norm(exact)`` against the float64 product of the unquantized operands, row by row
of the result, and its mean over the rows: a small row counts as much as a large one. The line of no recipe is what
bf16 itself costs. Three kinds of values: normal ones; channels of the input of very different size (a factor of
``exp(2.5 * normal)``), as activations have; and rows of the gradient of very different size, as tokens have. Delayed
scaling is measured after it has seen the same size of values for some steps. The last column is what the forward keeps
for the backward: bytes per element of input and weight. docs/recipes.md shows the output.
"""

from __future__ import annotations

import argparse

import environment_line
import torch

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories

E4M3, HYBRID = recipe.Format.E4M3, recipe.Format.HYBRID
RECIPES: dict[str, recipe.Recipe | None] = {
    "none (bf16)": None,
    "DelayedScaling()": recipe.DelayedScaling(),
    "Float8CurrentScaling()": recipe.Float8CurrentScaling(),
    "Float8CurrentScaling(E4M3)": recipe.Float8CurrentScaling(fp8_format=E4M3),
    "Float8BlockScaling()": recipe.Float8BlockScaling(),
    "Float8BlockScaling(use_f32_scales=True)": recipe.Float8BlockScaling(use_f32_scales=True),
    "MXFP8BlockScaling()": recipe.MXFP8BlockScaling(),
    "NVFP4BlockScaling()": recipe.NVFP4BlockScaling(),
    "NVFP4BlockScaling(disable_rht)": recipe.NVFP4BlockScaling(disable_rht=True),
    "MTFP8BlockScaling()": recipe.MTFP8BlockScaling(),
    "MTFP8BlockScaling(E4M3)": recipe.MTFP8BlockScaling(fp8_format=E4M3),
    "Float8CurrentScaling(backward_override='high_precision')": recipe.Float8CurrentScaling(
        backward_override="high_precision"
    ),
    "Float8CurrentScaling(backward_override='dequantized')": recipe.Float8CurrentScaling(
        backward_override="dequantized"
    ),
    "CustomRecipe(high_precision_fwd_mxfp8_bwd_factory)": recipe.CustomRecipe(
        qfactory=quantizer_factories.high_precision_fwd_mxfp8_bwd_factory
    ),
    "CustomRecipe(mxfp8_fwd_nvfp4_bwd_factory)": recipe.CustomRecipe(
        qfactory=quantizer_factories.mxfp8_fwd_nvfp4_bwd_factory
    ),
}


def inputs(kind: str, rows: int, features: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and gradient, ``[rows, features]`` in bf16."""
    generator = torch.Generator().manual_seed(seed)
    x, gradient = (torch.randn(rows, features, generator=generator) for _ in range(2))
    if kind == "channels":
        x *= torch.exp(2.5 * torch.randn(features, generator=torch.Generator().manual_seed(7)))
    if kind == "rows":
        gradient *= torch.exp(2.5 * torch.randn(rows, 1, generator=torch.Generator().manual_seed(8)))
    return x.bfloat16(), gradient.bfloat16()


def errors(chosen: recipe.Recipe | None, kind: str, rows: int, features: int, steps: int) -> list[float]:
    """Relative errors of fprop, dgrad and wgrad in the last step."""
    torch.manual_seed(0)
    module = te.Linear(features, features, bias=False, params_dtype=torch.bfloat16)
    for step in range(steps):
        x, gradient = inputs(kind, rows, features, step)
        x.requires_grad_()
        module.zero_grad()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        y.backward(gradient)
    left, weight, right = (tensor.detach().double() for tensor in (x, module.weight, gradient))
    exact = (left @ weight.T, right @ weight, right.T @ left)
    found = (y.detach(), x.grad, module.weight.grad)
    return [((a.double() - b).norm(dim=1) / b.norm(dim=1)).mean().item() for a, b in zip(found, exact, strict=True)]


def kept(chosen: recipe.Recipe | None, rows: int, features: int) -> float:
    """Bytes that the forward keeps for the backward, per element of input and weight together."""
    module = te.Linear(features, features, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(rows, features).bfloat16().requires_grad_()
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        te.autocast(enabled=chosen is not None, recipe=chosen),
    ):
        module(x)
    return sum(saved.values()) / (x.numel() + module.weight.numel())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--backend", default="cpu_reference")
    given = parser.parse_args()
    te_hal.set_backend(given.backend)
    print(environment_line.describe())
    print(f"Linear({given.features}, {given.features}) on {given.backend}, {given.rows} rows, bf16; errors in %")
    kinds = ("normal", "channels", "rows")
    print(f"| recipe | {' | '.join(f'{kind}: fprop, dgrad, wgrad' for kind in kinds)} | bytes kept |")
    print("|---" * (len(kinds) + 2) + "|")
    for name, chosen in RECIPES.items():
        cells = [errors(chosen, kind, given.rows, given.features, given.steps) for kind in kinds]
        shown = [", ".join(f"{100 * error:.2f}" for error in cell) for cell in cells]
        print(f"| `{name}` | {' | '.join([*shown, f'{kept(chosen, given.rows, given.features):.3f}'])} |", flush=True)


if __name__ == "__main__":
    main()
