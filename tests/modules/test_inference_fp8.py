"""Generation under FP8: calibrated scales, and decode steps of fewer rows than FP8 products take."""

from __future__ import annotations

import pytest
import torch
from generation import CHANNELS, HIDDEN, LAYERS, Generation, Stack, cache, whole

import te_hal.modules as te
from te_hal import recipe
from te_hal.modules import layernorm_linear, layernorm_mlp, linear, transformer
from te_hal.modules.attention import multihead_attention
from te_hal.modules.fp8_module import Fp8Module
from te_hal.modules.inference.row_padding import in_padded_rows

RECIPES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
#: NVFP4 has no data of fewer rows that the padded ones could be compared with.
ANY_ROWS = [name for name in RECIPES if name != "nvfp4"]
BF16, ZEROS = torch.bfloat16, 45.0


def stack_of(**arguments: object) -> Stack:
    stack = Stack(kv_channels=CHANNELS, fuse_qkv_params=True, params_dtype=BF16, **arguments)
    for layer in stack.layers:
        # A row of zeros would become ZEROS behind this norm; of the tokens' rows, channel 0 cancels most of it.
        layer.layernorm_qkv.layer_norm_bias.data[0] = ZEROS
        layer.layernorm_qkv.layer_norm_weight.data[0] = -10.0
        layer.proj.weight.data.mul_(0.1)
    return stack


def tokens_of(names: str) -> dict[str, torch.Tensor]:
    tokens = torch.randn(len(names), 11, HIDDEN)
    tokens[..., 0] = 5.0
    return dict(zip(names, tokens.to(BF16), strict=True))


def fp8_modules(model: torch.nn.Module) -> list[Fp8Module]:
    return [module for module in model.modules() if isinstance(module, Fp8Module)]


def decode(stack: Stack, chosen: recipe.Recipe, tokens: dict[str, torch.Tensor], *, padded: bool) -> list[torch.Tensor]:
    """A prompt of 8 rows each, then three steps of one token each."""
    generation = Generation(stack, cache(dtype=BF16), tokens)
    patch = pytest.MonkeyPatch()
    if not padded:
        for module in (linear, layernorm_linear):
            patch.setattr(module, "check_fp8_shape", lambda *_, **__: None)
        patch.setattr(
            "te_hal.modules.attention.multihead_attention.in_padded_rows", lambda layer, x, **given: layer(x, **given)
        )
    try:
        with torch.no_grad(), te.autocast(recipe=chosen):
            for step in ({"a": 8, "b": 8, "c": 8}, *[{"a": 1, "b": 1, "c": 1}] * 3):
                generation.step(step)
    finally:
        patch.undo()
    return [generation.output(name) for name in tokens]


@pytest.mark.parametrize("name", ANY_ROWS)
def test_a_decode_batch_gives_results_amax_and_scales_of_the_rows_alone(name):
    tokens = tokens_of("abc")
    found = {}
    for padded in (True, False):
        torch.manual_seed(5)
        stack = stack_of()
        outputs = decode(stack, RECIPES[name](), tokens, padded=padded)
        states = [
            (state.amax_history.clone(), state.scale.clone())
            for module in fp8_modules(stack)
            for _, state in module.delayed_states()
        ]
        found[padded] = (outputs, states)
    for output, alone in zip(found[True][0], found[False][0], strict=True):
        # Products of another number of rows may be summed in another order: a rounding of bf16 in places.
        assert (output.double() - alone.double()).norm() <= 2e-3 * alone.double().norm()
    assert len(found[True][1]) == (4 * LAYERS if name == "delayed" else 0)
    assert all(history.max() < 0.9 * ZEROS for history, _ in found[True][1])
    for state, alone in zip(found[True][1], found[False][1], strict=True):
        assert all(torch.equal(tensor, expected) for tensor, expected in zip(state, alone, strict=True))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows", [1, 5, 16], ids="{} rows".format)
def test_rows_are_filled_up_to_what_each_recipe_takes_and_cut_off_again(rows, name):
    layer = te.LayerNormLinear(HIDDEN, 64, params_dtype=BF16, return_bias=True, return_layernorm_output=True)
    x, taken = torch.randn(rows, 1, HIDDEN, dtype=BF16), []
    layer.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0].shape[0]))
    with torch.no_grad(), te.autocast(recipe=RECIPES[name]()):
        y, bias, normed = in_padded_rows(layer, x)
        whole_y, _, whole_normed = layer(torch.cat((x, x[-1:].expand(32 - rows, -1, -1))))
    multiple = {"mxfp8": 32, "nvfp4": 16}.get(name, 8)
    assert taken == [-(-rows // multiple) * multiple, 32]
    assert (y.shape, bias.shape, normed.shape) == ((rows, 1, 64), (64,), (rows, 1, HIDDEN))
    assert torch.equal(y, whole_y[:rows])
    assert torch.equal(normed, whole_normed[:rows])


@pytest.mark.parametrize("name", RECIPES)
def test_generation_stays_near_that_without_fp8(name):
    stack = Stack(fuse_qkv_params=True, params_dtype=BF16)
    tokens = tokens_of("abc")
    for output, each in zip(decode(stack, RECIPES[name](), tokens, padded=True), tokens.values(), strict=True):
        expected = whole(stack, each)
        assert output.dtype == BF16
        error = (output - expected).float().norm() / expected.float().norm()
        assert 1e-3 < error < (0.5 if name == "nvfp4" else 0.1)


def test_scales_from_calibration_are_those_of_generation_and_stay():
    stack, chosen = stack_of(), recipe.DelayedScaling(amax_history_len=4)
    prompt = torch.randn(2, 8, HIDDEN).to(BF16)
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=chosen):
        expected = stack(prompt)
    assert torch.equal(expected, stack(prompt))
    amaxes = [module.fp8_meta["scaling_fwd"].amax_history[0].clone() for module in fp8_modules(stack)]
    with te.autocast(recipe=chosen):  # with gradients on: the update that takes calibration up
        stack(prompt)
    scales = [module.fp8_meta["scaling_fwd"].scale.clone() for module in fp8_modules(stack)]
    for scale, amax in zip(scales, amaxes, strict=True):
        exact = torch.full_like(amax, 448.0) / amax
        assert scale[1] == exact[1]
        # The block's own forward may have met a larger input, behind layers that ran in FP8.
        assert 0.9 * exact[0] <= scale[0] <= exact[0]
    saved = stack.state_dict()
    other = stack_of()
    other.load_state_dict(saved)
    tokens = tokens_of("abc")
    outputs = decode(other, chosen, tokens, padded=True)
    assert all(
        torch.equal(module.fp8_meta["scaling_fwd"].scale, scale)
        for module, scale in zip(fp8_modules(other), scales, strict=True)
    )
    for output, again in zip(outputs, decode(stack, chosen, tokens, padded=True), strict=True):
        assert torch.equal(output, again)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_inference_mode_gives_the_bytes_of_no_grad_under_fp8(name):
    tokens = torch.randn(10, HIDDEN).to(BF16)
    results = []
    for context in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(3)
        stack = stack_of()
        generation = Generation(stack, cache(dtype=BF16), {"a": tokens})
        with context(), te.autocast(recipe=RECIPES[name]()):
            for count in (8, 1, 1):
                generation.step({"a": count})
        results.append(generation.output("a"))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", RECIPES)
def test_a_whole_layer_generates_with_amax_of_the_rows_alone(name):
    torch.manual_seed(2)
    layers = [te.TransformerLayer(HIDDEN, 64, 4, layer_number=1, attn_input_format="bshd", params_dtype=BF16).eval()]
    torch.nn.init.constant_(layers[0].layernorm_mlp.fc1_bias, 9.0)  # gelu of it is more than of any token's sum
    with torch.no_grad():
        layers[0].layernorm_mlp.fc1_weight.copy_(-layers[0].layernorm_mlp.fc1_weight.abs())
        layers[0].layernorm_mlp.layer_norm_bias.fill_(5.0)
    layers.append(te.TransformerLayer(HIDDEN, 64, 4, attn_input_format="bshd", params_dtype=BF16).eval())
    layers[1].load_state_dict(layers[0].state_dict())
    rows, params, chosen = torch.randn(3, 1, HIDDEN).to(BF16), cache(num_heads_kv=4, dtype=BF16), RECIPES[name]()
    params.pre_step(dict.fromkeys("abc", 1))
    with torch.no_grad(), te.autocast(recipe=chosen):
        y = layers[0](rows, inference_params=params)
        # As many rows as FP8 takes, none of them of another kind.
        filled = layers[1](torch.cat((rows, rows[-1:].expand(29, 1, HIDDEN))))
    assert (y - filled[:3]).float().norm() <= 4e-3 * y.float().norm()  # attention by another kernel, roundings of bf16
    for module, other in zip(fp8_modules(layers[0]), fp8_modules(layers[1]), strict=True):
        for (_, state), (_, expected) in zip(module.delayed_states(), other.delayed_states(), strict=True):
            assert torch.allclose(state.amax_history, expected.amax_history, rtol=1e-2)


def unpadded(patch: pytest.MonkeyPatch) -> None:
    """Any number of rows by themselves, in every product of a layer."""
    for module in (linear, layernorm_linear, layernorm_mlp):
        patch.setattr(module, "check_fp8_shape", lambda *_, **__: None)
    for module in (multihead_attention, transformer):
        patch.setattr(module, "in_padded_rows", lambda part, x, **given: part(x, **given))


@pytest.mark.parametrize("name", ANY_ROWS)
def test_a_decoder_generates_token_by_token_with_results_amax_and_scales_of_the_rows_alone(name, monkeypatch):
    tokens, encoded, found = torch.randn(3, 4, HIDDEN).to(BF16), torch.randn(3, 5, HIDDEN).to(BF16), {}
    tokens[..., 0] = 5.0
    for padded in (True, False):
        torch.manual_seed(2)
        layer = te.TransformerLayer(
            *(HIDDEN, 64, 4),
            layer_number=1,
            layer_type="decoder",
            attn_input_format="bshd",
            fuse_qkv_params=True,
            params_dtype=BF16,
        ).eval()
        # Rows of zeros would become ZEROS behind this norm.
        layer.inter_attention.layernorm_query.layer_norm_bias.data[0] = ZEROS
        layer.inter_attention.layernorm_query.layer_norm_weight.data[0] = -10.0
        if not padded:
            unpadded(monkeypatch)
        params, steps = cache(num_heads_kv=4, dtype=BF16), []
        with torch.no_grad(), te.autocast(recipe=RECIPES[name]()):
            for number in range(4):
                params.pre_step(dict.fromkeys("abc", 1))
                rows = tokens[:, number : number + 1]
                steps.append(layer(rows, encoder_output=encoded, inference_params=params))
        states = [state for module in fp8_modules(layer) for _, state in module.delayed_states()]
        found[padded] = (torch.cat(steps, dim=1), states)
    (output, states), (alone, expected) = found[True], found[False]
    assert (output.double() - alone.double()).norm() <= 4e-3 * alone.double().norm()  # sums in another order
    assert len(states) == (12 if name == "delayed" else 0)
    assert all(state.amax_history.max() < 0.9 * ZEROS for state in states)
    for state, other in zip(states, expected, strict=True):
        assert torch.allclose(state.amax_history, other.amax_history, rtol=1e-2)
        assert torch.equal(state.scale, other.scale)


def test_without_a_cache_the_shape_rule_holds():
    stack = stack_of()
    with torch.no_grad(), te.autocast(), pytest.raises(ValueError, match="the product of the leading sizes, 3"):
        stack(torch.randn(3, 1, HIDDEN).to(BF16))
