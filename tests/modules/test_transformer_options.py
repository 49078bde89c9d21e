"""TransformerLayer's options: decoder, attention and MLP side by side, drop path, what reaches attention."""

from __future__ import annotations

import closeness
import pytest
import torch
from exact_layer import Exact
from recomputed_stack import RECIPES, WAYS, same

import te_hal.modules as te

H, F, HEADS, SEQUENCE, BATCH, ENCODED = 32, 64, 4, 8, 4, 16
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
BSHD = {"attn_input_format": "bshd"}
#: norm(found - exact) / norm(exact) of the output and of gradients without FP8.
ERROR = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (6e-3, 4e-2)}


def layer(dtype: torch.dtype = torch.float32, **arguments) -> te.TransformerLayer:
    """With parameters that are all different from what they start with."""
    torch.manual_seed(0)
    module = te.TransformerLayer(H, F, HEADS, params_dtype=dtype, **QUIET | arguments)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.1))
    return module


def data(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Batch first."""
    generator = torch.Generator().manual_seed(4)
    made = {"x": SEQUENCE, "encoded": ENCODED, "gy": SEQUENCE}
    return {name: torch.randn(BATCH, length, H, generator=generator).to(dtype) for name, length in made.items()}


def step(module, given, chosen=None, **arguments) -> dict[str, torch.Tensor]:
    """A training step, whatever the order of dimensions."""
    module.zero_grad()
    first = module.self_attention.qkv_format == "bshd"
    turn = (lambda t: t) if first else (lambda t: t.transpose(0, 1))
    leaves = {name: given[name].detach().clone().requires_grad_() for name in ("x", "encoded")}
    if module.layer_type == "decoder":
        arguments["encoder_output"] = turn(leaves["encoded"])
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = turn(module(turn(leaves["x"]), **arguments))
    y.backward(given["gy"])
    found = {"y": y.detach(), "gx": leaves["x"].grad, "ge": leaves["encoded"].grad}
    found |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


def exact_step(exact: Exact, given, **masks) -> dict[str, torch.Tensor]:
    leaves = {name: given[name].double().requires_grad_() for name in ("x", "encoded")}
    decoder = exact.module.layer_type == "decoder"
    y = exact(leaves["x"], leaves["encoded"] if decoder else None, **masks)
    y.backward(given["gy"].double())
    found = {"y": y.detach(), "gx": leaves["x"].grad, "ge": leaves["encoded"].grad}
    found |= {name: value.grad for name, value in exact.wide.items()}
    return {name: value for name, value in found.items() if value is not None}


def assert_close(found, exact, dtype) -> None:
    assert found.keys() == exact.keys()
    for key, value in found.items():
        # The bias of keys shifts all scores of a row alike: its gradient is zero but for rounding.
        if not key.endswith("key_bias"):
            assert closeness.relative_error(value, exact[key]) <= ERROR[dtype][key != "y"], key


#: Arguments of the layer, and of its float64 counterpart.
CONFIGURED = {
    "decoder": ({"layer_type": "decoder"}, {}),
    "decoder_batch_first": ({"layer_type": "decoder", **BSHD}, {}),
    "decoder_gqa_rmsnorm": (
        {"layer_type": "decoder", "num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu"},
        {},
    ),
    "decoder_residual_after_norm": (
        {"layer_type": "decoder", "apply_residual_connection_post_layernorm": True},
        {"post": True},
    ),
    "decoder_output_layernorm": ({"layer_type": "decoder", "output_layernorm": True}, {"output_norm": True}),
    "decoder_without_bias": ({"layer_type": "decoder", "bias": False}, {}),
    "parallel": ({"parallel_attention_mlp": True}, {"parallel": True}),
    "parallel_without_bias": ({"parallel_attention_mlp": True, "bias": False}, {"parallel": True}),
}


@pytest.mark.parametrize("name", CONFIGURED)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_without_fp8_output_and_gradients_are_those_of_float64(dtype, name):
    arguments, written = CONFIGURED[name]
    module, given = layer(dtype, **arguments), data(dtype)
    assert_close(step(module, given), exact_step(Exact(module, **written), given), dtype)


def test_a_decoders_masks_and_windows_are_those_of_each_attention():
    module, given = layer(layer_type="decoder", **BSHD), data()
    of_encoder = torch.arange(ENCODED).expand(BATCH, 1, 1, ENCODED) >= 11
    of_queries = torch.zeros(BATCH, 1, 1, SEQUENCE, dtype=torch.bool)
    found = step(
        module,
        given,
        self_attn_mask_type="no_mask",
        window_size=(2, 1),
        bottom_right_diagonal=False,
        enc_dec_attn_mask_type="padding",
        enc_dec_attn_mask=(of_queries, of_encoder),
    )
    distance = torch.arange(SEQUENCE)[None] - torch.arange(SEQUENCE)[:, None]
    masks = {"hidden": (distance < -2) | (distance > 1), "hidden_of_encoded": of_encoder}
    assert_close(found, exact_step(Exact(module), given, **masks), torch.float32)
    windowed = step(module, given, enc_dec_window_size=(3, 3), enc_dec_bottom_right_diagonal=False)
    distance = torch.arange(ENCODED)[None] - torch.arange(SEQUENCE)[:, None]
    exact = exact_step(Exact(module), given, hidden_of_encoded=distance.abs() > 3)
    assert_close(windowed, exact, torch.float32)


def test_settings_of_the_constructor_are_those_of_a_call():
    settings = {"window_size": (3, 0), "enc_dec_window_size": (2, 2), "enc_dec_bottom_right_diagonal": False}
    first, second, given = layer(layer_type="decoder", **settings), layer(layer_type="decoder"), data()
    found, expected = step(first, given), step(second, given, **settings)
    assert same([*found.values()], [*expected.values()])


def test_packed_sequences_go_through_a_decoder_as_one_by_one():
    module = layer(layer_type="decoder", attn_input_format="thd", self_attn_mask_type="padding_causal")
    one_by_one = layer(layer_type="decoder", **BSHD)
    queries, keys = [3, 5], [6, 2]
    x, encoded = torch.randn(8, H), torch.randn(8, H)
    y = module(
        x,
        encoder_output=encoded,
        enc_dec_attn_mask_type="padding",
        cu_seqlens_q=torch.tensor([0, 3, 8]),
        cu_seqlens_kv=torch.tensor([0, 6, 8]),
    )
    parts = zip(x.split(queries), encoded.split(keys), strict=True)
    expected = torch.cat([one_by_one(a[None], encoder_output=b[None])[0] for a, b in parts])
    assert closeness.relative_error(y, expected) <= 1e-6


@pytest.mark.parametrize("bias_type", ["alibi", "post_scale_bias"])
def test_biases_and_angles_reach_both_attentions(bias_type):
    module, given = layer(layer_type="decoder", self_attn_mask_type="no_mask", **BSHD), data()
    x, encoded = given["x"], given["encoded"][:, :SEQUENCE]
    angles = te.RotaryPositionEmbedding(H // HEADS)(SEQUENCE)
    settings = {"core_attention_bias_type": bias_type, "rotary_pos_emb": angles}
    if bias_type == "post_scale_bias":
        settings["core_attention_bias"] = torch.randn(1, HEADS, SEQUENCE, SEQUENCE)
    result, bias = module.self_attention(x, **settings)
    between = x + (result + bias)
    result, bias = module.inter_attention(between, encoder_output=encoded, **settings)
    between = between + (result + bias)
    result, bias = module.layernorm_mlp(between)
    found = module(x, encoder_output=encoded, **settings)
    assert torch.allclose(found, between + (result + bias), atol=1e-5)


@pytest.mark.parametrize("setting", [{"qk_norm_type": "RMSNorm"}, {"softmax_type": "learnable"}], ids=str)
def test_norms_of_queries_and_softmax_types_are_both_attentions(setting):
    module, given = layer(layer_type="decoder", **setting), data()
    found = step(module, given)
    own = "q_norm.weight" if "qk_norm_type" in setting else "core_attention.softmax_offset"
    for part in ("self_attention", "inter_attention"):
        assert found[f"{part}.{own}"].any()


def test_parameter_names_of_a_decoder_are_those_of_transformer_engine():
    def names(**arguments) -> set[str]:
        made = te.TransformerLayer(H, F, HEADS, layer_type="decoder", **arguments)
        return {name.removeprefix("inter_attention.") for name, _ in made.named_parameters() if "inter" in name}

    norm = {"layernorm_query.layer_norm_weight", "layernorm_query.layer_norm_bias"}
    proj = {"proj.weight", "proj.bias"}
    fused = {"layernorm_query.weight", "layernorm_query.bias", "key_value.weight", "key_value.bias"}
    split = {f"layernorm_query.query_{kind}" for kind in ("weight", "bias")}
    split |= {f"key_value.{part}_{kind}" for part in ("key", "value") for kind in ("weight", "bias")}
    assert names(fuse_qkv_params=True) == norm | proj | fused
    assert names() == norm | proj | split


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("case", ["decoder", "parallel"])
def test_under_fp8_it_stays_near_and_every_product_is_quantized(case, name):
    module, given = layer(torch.bfloat16, **CONFIGURED[case][0]), data(torch.bfloat16)
    plain, found = step(module, given), step(module, given, RECIPES[name]())
    assert all(part.fp8 for part in module.modules() if hasattr(part, "fp8"))
    assert 0.002 < closeness.relative_error(found["y"], plain["y"]) < 0.1
    for key in ("gx", "layernorm_mlp.fc2_weight", "self_attention.proj.weight"):
        assert 0.005 < closeness.relative_error(found[key], plain[key]) < 0.3, key


@pytest.mark.parametrize("way", WAYS)
def test_a_decoder_recomputes_with_all_it_draws(way):
    found = []
    for recomputed in (False, True):
        module = layer(layer_type="decoder", hidden_dropout=0.1, attention_dropout=0.1, drop_path_rate=0.3)
        given = data()
        x, encoded = (given[name].transpose(0, 1).requires_grad_() for name in ("x", "encoded"))
        torch.manual_seed(2)

        def run(h: torch.Tensor, module=module, encoded=encoded) -> torch.Tensor:
            return module(h, encoder_output=encoded)

        with te.autocast(recipe=RECIPES["delayed"]()):
            y = WAYS[way](run, x) if recomputed else run(x)
        y.square().sum().backward()
        found.append([y, x.grad, encoded.grad, *(parameter.grad for parameter in module.parameters())])
    assert same(*found)


@pytest.mark.parametrize("inputs", ["sbhd", "bshd"])
def test_drop_path_drops_what_a_part_gave_for_whole_indices_of_the_first_dimension(inputs):
    module = layer(drop_path_rate=0.25, attn_input_format=inputs)
    for part in (module.self_attention.proj.weight, module.layernorm_mlp.fc2_weight):
        torch.nn.init.zeros_(part)
    torch.nn.init.constant_(module.self_attention.proj.bias, 3.0)
    torch.nn.init.zeros_(module.layernorm_mlp.fc2_bias)
    given = module(torch.zeros(400, 4, H))
    assert set(given.unique().tolist()) == {0.0, 4.0}
    assert (given == given[:, :1, :1]).all()
    assert abs((given[:, 0, 0] == 0).float().mean().item() - 0.25) < 0.07
    module.eval()
    assert (module(torch.zeros(8, 4, H)) == 3.0).all()


def test_drop_path_leaves_the_encoders_output_alone():
    module = layer(layer_type="decoder", drop_path_rate=0.999)
    for name in ("self_attention.proj", "inter_attention.proj"):
        torch.nn.init.zeros_(module.get_submodule(name).weight)
    torch.nn.init.constant_(module.self_attention.proj.bias, 5.0)
    torch.nn.init.constant_(module.inter_attention.proj.bias, 3.0)
    torch.nn.init.zeros_(module.layernorm_mlp.fc2_weight)
    torch.nn.init.constant_(module.layernorm_mlp.fc2_bias, 7.0)
    torch.manual_seed(1)
    given = module(torch.zeros(8, 4, H), encoder_output=torch.zeros(4, 4, H))
    assert (given == 3.0).all()


#: Arguments that exclude each other.
CLASHES = [
    {"apply_residual_connection_post_layernorm": True},
    {"output_layernorm": True},
    {"layer_type": "decoder"},
]


@pytest.mark.parametrize("other", CLASHES, ids=str)
def test_side_by_side_excludes_what_it_cannot_have(other):
    with pytest.raises(
        ValueError, match=rf"TransformerLayer: parallel_attention_mlp: got True with {next(iter(other))}="
    ):
        te.TransformerLayer(H, F, HEADS, parallel_attention_mlp=True, **other)


def test_a_decoder_without_an_encoders_output_is_told():
    module = te.TransformerLayer(H, F, HEADS, layer_type="decoder", layer_number=2)
    with pytest.raises(ValueError, match=r"'layer_2\.inter_attention'.*encoder_output.*got None"):
        module(torch.zeros(SEQUENCE, BATCH, H))


def test_sizes_that_kernels_would_be_prepared_for_change_nothing():
    first, second = layer(), layer(seq_length=SEQUENCE, micro_batch_size=BATCH, ub_overlap_ag=False)
    x = data()["x"]
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("rotary", [False, True], ids=["no angles", "angles"])
def test_a_decoder_generates_with_a_cache_for_its_own_tokens(rotary):
    module = layer(layer_type="decoder", layer_number=1, self_attn_mask_type="padding_causal", **BSHD).eval()
    given = data()
    x, encoded = given["x"], given["encoded"]
    angles = te.RotaryPositionEmbedding(H // HEADS)(ENCODED) if rotary else None
    cache = te.InferenceParams(BATCH, SEQUENCE, HEADS, H // HEADS, torch.float32)
    with torch.no_grad():
        whole = module(x, encoder_output=encoded, self_attn_mask_type="causal", rotary_pos_emb=angles)
        steps = []
        for start, end in [(0, 5), *((number, number + 1) for number in range(5, SEQUENCE))]:
            cache.pre_step(dict.fromkeys(range(BATCH), end - start))
            steps.append(module(x[:, start:end], encoder_output=encoded, inference_params=cache, rotary_pos_emb=angles))
    assert closeness.relative_error(torch.cat(steps, dim=1), whole) <= 1e-6


def test_a_decoder_generates_packed_sequences_one_token_at_a_time():
    module = layer(layer_type="decoder", layer_number=1, self_attn_mask_type="padding_causal", attn_input_format="thd")
    one_by_one = layer(layer_type="decoder", **BSHD)
    angles = te.RotaryPositionEmbedding(H // HEADS)(ENCODED)
    x, encoded, cu_seqlens_kv = torch.randn(8, H), torch.randn(8, H), torch.tensor([0, 6, 8])
    cache = te.InferenceParams(2, SEQUENCE, HEADS, H // HEADS, torch.float32, qkv_format="thd")
    fixed = {"encoder_output": encoded, "enc_dec_attn_mask_type": "padding", "cu_seqlens_kv": cu_seqlens_kv}
    steps, found = [(0, 1), (1, 2), (1, 0), (1, 2)], {"a": [], "b": []}
    rows = {"a": list(x[:3]), "b": list(x[3:])}
    with torch.no_grad():
        for step in steps:
            new = dict(zip("ab", step, strict=True))
            cache.pre_step(new)
            tokens = torch.stack([rows[name].pop(0) for name, count in new.items() for _ in range(count)])
            y = module(tokens, inference_params=cache, rotary_pos_emb=angles, **fixed)
            for name, part in zip("ab", y.split(step), strict=True):
                found[name].append(part)
        for name, tokens, keys in (("a", x[:3], encoded[:6]), ("b", x[3:], encoded[6:])):
            alone = one_by_one(tokens[None], encoder_output=keys[None], rotary_pos_emb=angles)[0]
            assert closeness.relative_error(torch.cat(found[name]), alone) <= 1e-6


#: Arguments of a decoder's call that say something about positions in its attention to the encoder's output.
OF_POSITIONS = {
    "enc_dec_attn_mask_type": ("causal", "attn_mask_type .*got 'causal'"),
    "enc_dec_window_size": ((2, 2), r"window_size .*got \(2, 2\)"),
    "core_attention_bias_type": ("alibi", "core_attention_bias_type .*got 'alibi'"),
}


@pytest.mark.parametrize("name", OF_POSITIONS)
def test_a_step_refuses_cross_attention_that_depends_on_where_a_query_stands(name):
    module = layer(layer_type="decoder", layer_number=1, self_attn_mask_type="padding_causal", **BSHD)
    value, said = OF_POSITIONS[name]
    cache = te.InferenceParams(BATCH, SEQUENCE, HEADS, H // HEADS, torch.float32)
    cache.pre_step(dict.fromkeys(range(BATCH), 1))
    given = data()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=rf"{said} for cross attention with inference_params.*do not begin at position"),
    ):
        module(given["x"][:, :1], encoder_output=given["encoded"], inference_params=cache, **{name: value})
