"""What a whole transformer layer keeps for its backward: no more than the formula of docs/modules.md, counted live."""

from __future__ import annotations

import pytest
import torch
from transformer_bytes import LayerSize, activation_bytes, bytes_kept, weight_bytes

import te_hal.modules as te
from te_hal import recipe

SEQUENCE, BATCH = 32, 4
SIZES = {
    "ffn_four_times": LayerSize(SEQUENCE * BATCH, 64, 256, 4),
    "ffn_twice": LayerSize(SEQUENCE * BATCH, 48, 96, 3),
}
RECIPES = {"bf16": None, "delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}


def kept(size: LayerSize, name: str, **arguments: object) -> int:
    layer = te.TransformerLayer(
        size.hidden,
        size.ffn,
        size.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        **arguments,
    )
    shape = (BATCH, SEQUENCE) if arguments.get("attn_input_format") == "bshd" else (SEQUENCE, BATCH)
    inputs = torch.randn(*shape, size.hidden, dtype=torch.bfloat16, requires_grad=True)
    chosen = RECIPES[name]

    def forward() -> torch.Tensor:
        with te.autocast(enabled=chosen is not None, recipe=None if chosen is None else chosen()):
            return layer(inputs)

    return bytes_kept(layer, forward)


@pytest.mark.parametrize("attn_input_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("case", SIZES)
def test_a_layer_keeps_what_the_formula_says(case, name, attn_input_format):
    size, fp8 = SIZES[case], RECIPES[name] is not None
    expected = activation_bytes(size, fp8=fp8) + (weight_bytes(size) if fp8 else 0)
    assert kept(size, name, fuse_qkv_params=True, attn_input_format=attn_input_format) == expected


@pytest.mark.parametrize("name", RECIPES)
def test_split_weights_are_joined_into_a_copy_that_is_kept_without_fp8_only(name):
    size = SIZES["ffn_four_times"]
    joined = 0 if RECIPES[name] is not None else 2 * 3 * size.hidden**2
    assert kept(size, name) == kept(size, name, fuse_qkv_params=True) + joined


def test_the_formula_for_a_layer_of_4096():
    # 32 bytes per token and feature in bf16, 27 in FP8, both with statistics of norms and attention.
    size = LayerSize(8192, 4096, 16384, 32)
    assert activation_bytes(size, fp8=False) == 8192 * (32 * 4096 + 16 + 4 * 32)
    assert activation_bytes(size, fp8=True) == 8192 * (27 * 4096 + 16 + 4 * 32)
    assert weight_bytes(size) == 12 * 4096**2 + 32
