"""Modules under recipes with a scale per block: results by brute-force casts, sizes, caches, state, changes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import block_oracle
import closeness
import pytest
import torch
from stub_backends import stub

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.dispatch import register_backend
from te_hal.schema.errors import ArgumentError, StateError, UnsupportedError
from te_hal.schema.formats import E4M3, E5M2, ScalingMode
from te_hal.schema.support import SUPPORTED, Call, Code, Support

if TYPE_CHECKING:
    import numpy as np

ROW, SQUARE, MX = ScalingMode.BLOCK_1X128, ScalingMode.BLOCK_128X128, ScalingMode.MXFP8
HYBRID = recipe.Format.HYBRID

#: Recipe; blocks of input, weight and gradient; format of the gradient; what brute force takes besides.
RECIPES = {
    "block": (recipe.Float8BlockScaling(), (ROW, SQUARE, ROW), E4M3, {"pow2": True}),
    "block fp32": (recipe.Float8BlockScaling(use_f32_scales=True, fp8_format=HYBRID), (ROW, SQUARE, ROW), E5M2, {}),
    "block 1d": (recipe.Float8BlockScaling(w_block_scaling_dim=1), (ROW, ROW, ROW), E4M3, {"pow2": True}),
    "block 2d x": (
        recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
        (SQUARE, ROW, ROW),
        E4M3,
        {"pow2": True},
    ),
    "mxfp8": (recipe.MXFP8BlockScaling(), (MX, MX, MX), E4M3, {}),
    "mxfp8 hybrid": (recipe.MXFP8BlockScaling(fp8_format=HYBRID), (MX, MX, MX), E5M2, {}),
}
BUILT_IN = {
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "mtfp8": recipe.MTFP8BlockScaling,
}
FP32_ERROR = 5e-6


def step(
    module: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor, chosen: recipe.Recipe | None
) -> list[torch.Tensor]:
    """y, gx and the gradients of the parameters; None: without FP8."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(x)
    y.backward(gy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def close(result: torch.Tensor, exact: np.ndarray) -> bool:
    reference = torch.from_numpy(exact)
    error = FP32_ERROR * reference.abs().max()
    return closeness.roundings(result.reshape(reference.shape), reference, error) <= 1


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_linear_multiplies_the_copies_whose_blocks_lie_along_the_sum(dtype, name):
    chosen, modes, backward, options = RECIPES[name]
    torch.manual_seed(0)
    module = te.Linear(160, 192, params_dtype=dtype)
    x, gy = torch.randn(2, 96, 160, dtype=dtype), torch.randn(2, 96, 192, dtype=dtype)
    x *= torch.exp2(torch.randint(-8, 8, (160,)).float()).to(dtype)

    def cast(tensor: torch.Tensor, place: int, *, rowwise: bool) -> np.ndarray:
        rows, fmt = tensor.detach().reshape(-1, tensor.shape[-1]), (E4M3, E4M3, backward)[place]
        return block_oracle.cast(rows, modes[place], fmt, rowwise=rowwise, **options).values

    bias = module.bias.detach().to(torch.bfloat16).double().numpy()
    y = cast(x, 0, rowwise=True) @ cast(module.weight, 1, rowwise=True).T + bias
    gx = cast(gy, 2, rowwise=True) @ cast(module.weight, 1, rowwise=False)
    gw = cast(gy, 2, rowwise=False).T @ cast(x, 0, rowwise=False)
    gb = gy.double().reshape(-1, 192).sum(0).numpy()
    assert all(map(close, step(module, x, gy, chosen), (y, gx, gw, gb)))


MODULES = {
    "Linear": lambda: te.Linear(160, 96, params_dtype=torch.bfloat16),
    "save_original_input": lambda: te.Linear(160, 96, params_dtype=torch.bfloat16, save_original_input=True),
    "LayerNormLinear": lambda: te.LayerNormLinear(160, 96, params_dtype=torch.bfloat16),
    "RMSNormLinear": lambda: te.LayerNormLinear(160, 96, params_dtype=torch.bfloat16, normalization="RMSNorm"),
    "LayerNormMLP": lambda: te.LayerNormMLP(160, 96, params_dtype=torch.bfloat16),
    "swiglu": lambda: te.LayerNormMLP(160, 96, params_dtype=torch.bfloat16, activation="swiglu"),
}
EVERY = pytest.mark.parametrize("chosen", [make() for make in BUILT_IN.values()], ids=list(BUILT_IN))


def made(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A module, an input and a gradient."""
    torch.manual_seed(1)
    module, x = MODULES[name](), torch.randn(64, 160, dtype=torch.bfloat16)
    return module, x, torch.randn_like(module(x))


@EVERY
@pytest.mark.parametrize("name", MODULES)
def test_every_module_runs_and_stays_within_what_eight_bits_cost(name, chosen):
    module, x, gy = made(name)
    plain = step(module, x, gy, None)
    for result, reference in zip(step(module, x, gy, chosen), plain, strict=True):
        assert result.isfinite().all()
        assert closeness.relative_error(result, reference) < 0.12


@EVERY
@pytest.mark.parametrize("what", ["input", "row", "weight", "gradient"])
def test_zeros_stay_zero_and_everything_stays_finite(what, chosen):
    module, x, gy = made("Linear")
    with torch.no_grad():
        module.bias.zero_()
        {"input": x, "row": x[3], "weight": module.weight, "gradient": gy}[what].zero_()
    y, gx, gw, gb = step(module, x, gy, chosen)
    assert all(value.isfinite().all() for value in (y, gx, gw, gb))
    zeros = {"input": (y, gw), "row": (y[3],), "weight": (y, gx), "gradient": (gx, gw, gb)}[what]
    assert not any(value.any() for value in zeros)


@EVERY
def test_microbatches_that_keep_the_weight_give_the_same_bytes(chosen):
    module, x, gy = made("LayerNormMLP")
    expected = step(module, x, gy, chosen)
    for first in (True, False, False):
        module.zero_grad()
        inp = x.clone().requires_grad_()
        with te.autocast(recipe=chosen):
            y = module(inp, is_first_microbatch=first)
        y.backward(gy)
        assert torch.equal(y, expected[0])
        assert torch.equal(inp.grad, expected[1])
    assert len(module._fp8_workspaces) == 2
    with torch.no_grad():
        module.fc1_weight.mul_(2)
    with te.autocast(recipe=chosen):
        assert not torch.equal(module(x, is_first_microbatch=False), expected[0])


@EVERY
def test_wgrad_goes_into_main_grad(chosen):
    module = te.Linear(160, 96, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    twin = te.Linear(160, 96, params_dtype=torch.bfloat16)
    twin.load_state_dict(module.state_dict())
    module.weight.main_grad = torch.full((96, 160), 0.5)
    x, gy = torch.randn(64, 160, dtype=torch.bfloat16), torch.randn(64, 96, dtype=torch.bfloat16)
    expected = step(twin, x, gy, chosen)[2]
    step(module, x, gy, chosen)
    assert closeness.relative_error(module.weight.main_grad - 0.5, expected) < 3e-3


# What is handed on


@EVERY
def test_a_quantized_output_is_of_the_recipes_kind_and_the_next_module_takes_it(chosen):
    first, second = (te.Linear(96, 96, params_dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(recipe=chosen):
        handed = first(x, fp8_output=True)
        assert isinstance(handed, te.QuantizedTensor)
        assert handed.quantized_storage.mode is chosen.mode_of("output")
        y = second(handed, fp8_grad=True)
    y.sum().backward()
    assert x.grad.isfinite().all()
    with te.autocast(recipe=chosen):
        assert torch.equal(second(handed.dequantize()), y)


def test_a_per_tensor_input_under_a_block_recipe_is_a_mixed_product_and_refused_by_name():
    q = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(torch.ones(32, 64))
    module = te.Linear(64, 32, params_dtype=torch.float32)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()), pytest.raises(UnsupportedError, match="'mxfp8' and 'tensor'"):
        module(q)
    assert not module.fp8_initialized


# Sizes


@pytest.mark.parametrize(
    ("features", "shape", "named"),
    [
        ((160, 96), (48, 160), "the product of the leading sizes, 48, must be divisible by 32"),
        ((176, 96), (64, 176), "the last size, 176, must be divisible by 32"),
        ((160, 80), (64, 160), "out_features, 80, must be divisible by 32"),
    ],
)
def test_mxfp8_takes_whole_blocks_and_names_operand_and_multiple(features, shape, named):
    module = te.Linear(*features)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()), pytest.raises(ArgumentError, match=named):
        module(torch.ones(shape))
    assert not module.fp8_initialized
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        module(torch.ones(shape))


def test_blocks_of_128_take_edges_of_any_length():
    module = te.Linear(144, 136)
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        module(torch.randn(8, 144)).sum().backward()
    with te.autocast(recipe=recipe.Float8BlockScaling()), pytest.raises(ArgumentError, match="divisible by 16"):
        te.Linear(136, 136)(torch.randn(8, 136))


# State and changes


@EVERY
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP"])
def test_there_is_no_state_and_saving_loading_saving_gives_the_same_bytes(name, chosen):
    module, x, gy = made(name)
    step(module, x, gy, chosen)
    saved = module.state_dict()
    assert saved["_extra_state"].shape == (0,)
    assert saved["_extra_state"].dtype == torch.uint8
    other = MODULES[name]()
    other.load_state_dict(saved)
    again = other.state_dict()
    assert all(torch.equal(saved[key], again[key]) for key in saved)
    for one, two in zip(step(module, x, gy, chosen), step(other, x, gy, chosen), strict=True):
        assert torch.equal(one, two)


CHANGES = {
    "class": (recipe.MXFP8BlockScaling(), recipe.Float8BlockScaling()),
    "to delayed": (recipe.MXFP8BlockScaling(), recipe.DelayedScaling()),
    "from delayed": (recipe.DelayedScaling(), recipe.Float8BlockScaling()),
    "format": (recipe.MXFP8BlockScaling(), recipe.MXFP8BlockScaling(fp8_format=HYBRID)),
    "scales": (recipe.Float8BlockScaling(), recipe.Float8BlockScaling(use_f32_scales=True)),
    "dimension": (recipe.Float8BlockScaling(), recipe.Float8BlockScaling(w_block_scaling_dim=1)),
    "Moore Threads": (recipe.Float8BlockScaling(), recipe.MTFP8BlockScaling()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_recipe_takes_effect_at_the_next_step_and_drops_cached_weights(change):
    before, after = CHANGES[change]
    module, x, gy = made("Linear")
    with te.autocast(recipe=before):
        module(x, is_first_microbatch=True)
    with pytest.warns(UserWarning, match="quantized anew"):
        found = step(module, x, gy, after)
    fresh = made("Linear")[0]
    for one, two in zip(found, step(fresh, x, gy, after), strict=True):
        assert torch.equal(one, two)
    with te.autocast(recipe=before):
        module(x, is_first_microbatch=True)
    with te.autocast(recipe=after), pytest.warns(UserWarning, match="quantized anew"):
        cached = module(x, is_first_microbatch=False)
    assert torch.equal(cached, made_output(after))


def made_output(chosen: recipe.Recipe) -> torch.Tensor:
    module, x, gy = made("Linear")
    if chosen.delayed():  # its first step has moved the scales by now
        step(module, x, gy, chosen)
    with te.autocast(recipe=chosen):
        return module(x)


def test_the_same_object_changed_in_place_is_noticed():
    chosen = recipe.Float8BlockScaling()
    module, x, gy = made("Linear")
    step(module, x, gy, chosen)
    chosen.use_f32_scales = True
    found = step(module, x, gy, chosen)
    for one, two in zip(found, step(made("Linear")[0], x, gy, chosen), strict=True):
        assert torch.equal(one, two)


def test_weights_that_live_in_fp8_refuse_a_recipe_with_blocks():
    with te.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        module = te.Linear(64, 64)
    with te.autocast(recipe=recipe.Float8BlockScaling()), pytest.raises(StateError, match="recipe mismatch"):
        module(torch.ones(32, 64))


@pytest.mark.parametrize("mode", [ROW, SQUARE, MX, ScalingMode.MTFP8_1X128, ScalingMode.MTFP8_128X128])
def test_a_backend_that_lacks_a_mode_refuses_the_recipes_that_need_it_on_entry(mode):
    with te_hal.use_backend("cpu_reference"):
        kernels = dict(te_hal.get_backend().kernels)

    def supports(call: Call) -> Support:
        return Support.no(Code.MODE, "no such blocks") if call.flags.get("mode") is mode else SUPPORTED

    register_backend(stub("toy", kernels=kernels, supports=supports))
    with te_hal.use_backend("toy"):
        for chosen in (make() for make in BUILT_IN.values()):
            needed = mode in {chosen.mode_of(role) for role in ("input", "weight", "grad_output")}
            refusal = pytest.raises(UnsupportedError, match="no such blocks") if needed else nullcontext()
            with refusal, te.autocast(recipe=chosen):
                pass
