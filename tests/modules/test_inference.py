"""Generation with a cache: prefill and decode against the forward of whole sequences."""

from __future__ import annotations

import pytest
import torch
from generation import CHANNELS, GROUPS, HEADS, HIDDEN, LAYERS, LONGEST, Generation, Stack, cache, whole

import te_hal.modules as te

LAYOUTS = {"rows": {}, "pages": {"is_paged": True, "page_size": 4}}
FORMATS = ["bshd", "sbhd", "thd"]
#: Roundings of fp32 in two layers whose sums run in another order.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}

#: Steps of sequences that join, wait, leave, and are fed in parts; and the tokens that each gets in all.
SCHEDULES = {
    "one, token by token": [{"a": 1}] * 6,
    "a batch of equals": [{"a": 5, "b": 5}, *[{"a": 1, "b": 1}] * 4],
    "a ragged batch": [{"a": 5, "b": 2, "c": 7}, *[{"a": 1, "b": 1, "c": 1}] * 3],
    "joining and leaving": [
        {"a": 4},
        {"a": 1, "b": 6},
        {"a": 1, "b": 1, "c": 3},
        {"c": 1, "b": 1},
        {"c": 1, "d": 5, "b": 2},
        {"d": 1},
    ],
    "waiting": [{"a": 3, "b": 4}, {"a": 0, "b": 2}, {"a": 2, "b": 0}, {"b": 1, "a": 1}],
    "a prompt in parts": [{"a": 8}, {"a": 8}, {"a": 5}],
}


def generate(stack: Stack, params: te.InferenceParams, schedule: list[dict[str, int]]) -> Generation:
    names = {name for step in schedule for name in step}
    lengths = {name: sum(step.get(name, 0) for step in schedule) for name in sorted(names)}
    tokens = {name: torch.randn(length, HIDDEN) for name, length in lengths.items()}
    generation = Generation(stack, params, tokens)
    with torch.no_grad():
        for step in schedule:
            generation.step(step)
    return generation


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qkv_format", FORMATS)
def test_prefill_and_decode_give_what_the_whole_sequence_gives(qkv_format, layout, schedule):
    stack = Stack(qkv_format)
    generation = generate(stack, cache(qkv_format=qkv_format, **LAYOUTS[layout]), SCHEDULES[schedule])
    for name, tokens in generation.tokens.items():
        torch.testing.assert_close(generation.output(name), whole(stack, tokens), **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_layer", ["bshd", "sbhd"])
def test_a_cache_of_rows_serves_layers_whichever_dimension_is_first(of_layer, layout):
    layer = te.MultiheadAttention(HIDDEN, HEADS, layer_number=1, qkv_format=of_layer, attn_mask_type="causal").eval()
    found = []
    rows = torch.randn(2, 7, HIDDEN)
    for of_cache in ("bshd", "sbhd"):
        params, outputs = cache(num_heads_kv=HEADS, qkv_format=of_cache, **LAYOUTS[layout]), []
        for new in rows.split([4, 1, 2], 1):
            params.pre_step({"a": new.shape[1], "b": new.shape[1]})
            with torch.no_grad():
                output = layer(new if of_layer == "bshd" else new.transpose(0, 1), inference_params=params)
            outputs.append(output if of_layer == "bshd" else output.transpose(0, 1))
        found.append(torch.cat(outputs, 1))
    with torch.no_grad():
        exact = layer(rows if of_layer == "bshd" else rows.transpose(0, 1))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], exact if of_layer == "bshd" else exact.transpose(0, 1), **CLOSE)


FEATURES = {
    "window": {"window_size": (3, 0)},
    "norms of queries and keys": {"qk_norm_type": "RMSNorm"},
    "softmax": {"softmax_type": "learnable"},
    "one head of keys": {"num_gqa_groups": 1},
    "padding named": {"attn_mask_type": "padding_causal"},
    "bottom right named": {"attn_mask_type": "padding_causal_bottom_right"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_attention_work_over_a_cache(feature, layout):
    arguments = FEATURES[feature]
    stack = Stack(**arguments)
    params = cache(num_heads_kv=arguments.get("num_gqa_groups", GROUPS), **LAYOUTS[layout])
    generation = generate(stack, params, SCHEDULES["joining and leaving"])
    for name, tokens in generation.tokens.items():
        causal = {"attn_mask_type": "causal"} if "attn_mask_type" in arguments else {}
        torch.testing.assert_close(generation.output(name), whole(stack, tokens, **causal), **CLOSE)


@pytest.mark.parametrize("qkv_format", FORMATS)
def test_alibi_counts_from_the_end_of_each_sequence(qkv_format):
    stack = Stack(qkv_format)
    tokens = {"a": torch.randn(7, HIDDEN), "b": torch.randn(5, HIDDEN)}
    generation = Generation(stack, cache(qkv_format=qkv_format), tokens)
    with torch.no_grad():
        for step in ({"a": 4, "b": 2}, {"a": 1, "b": 1}, {"b": 2, "a": 2}):
            generation.step(step, core_attention_bias_type="alibi")
    for name, each in tokens.items():
        torch.testing.assert_close(
            generation.output(name), whole(stack, each, core_attention_bias_type="alibi"), **CLOSE
        )


@pytest.mark.parametrize("attn_input_format", ["bshd", "sbhd"])
def test_transformer_layers_generate(attn_input_format):
    layers = torch.nn.ModuleList(
        te.TransformerLayer(HIDDEN, 64, HEADS, layer_number=n + 1, attn_input_format=attn_input_format).eval()
        for n in range(LAYERS)
    )

    class Model(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, **arguments: object) -> torch.Tensor:
            for layer in layers:
                hidden = layer(hidden, **arguments)
            return hidden

    schedule = SCHEDULES["joining and leaving"]
    generation = generate(Model(), cache(num_heads_kv=HEADS, qkv_format=attn_input_format), schedule)
    for name, tokens in generation.tokens.items():
        row = tokens.unsqueeze(0) if attn_input_format == "bshd" else tokens.unsqueeze(1)
        torch.testing.assert_close(generation.output(name), Model()(row).view(tokens.shape), **CLOSE)


def test_without_a_causal_mask_new_queries_see_all_that_is_cached():
    attention = te.DotProductAttention(1, 4, qkv_format="bshd", attn_mask_type="no_mask", layer_number=1)
    params = cache(num_heads_kv=1, head_dim_k=4)
    key = torch.randn(1, 5, 1, 4)
    with torch.no_grad():
        for start, end in ((0, 3), (3, 5)):
            params.pre_step({"a": end - start})
            part = key[:, start:end]
            y = attention(part, part, part, inference_params=params)
            torch.testing.assert_close(y, attention(part, key[:, :end], key[:, :end]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_may_have_channels_of_their_own(layout):
    attention = te.DotProductAttention(2, (4, 6), qkv_format="bshd", layer_number=1)
    params = cache(num_heads_kv=2, head_dim_k=4, head_dim_v=6, **LAYOUTS[layout])
    query, key, value = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 2, 4), torch.randn(1, 6, 2, 6)
    found = []
    with torch.no_grad():
        for start, end in ((0, 4), (4, 5), (5, 6)):
            params.pre_step({"a": end - start})
            part = slice(start, end)
            found.append(attention(query[:, part], key[:, part], value[:, part], inference_params=params))
    torch.testing.assert_close(torch.cat(found, 1), attention(query, key, value))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_sequence_left_behind_reaches_nobody(layout):
    stack = Stack()
    params = cache(**LAYOUTS[layout])
    tokens = {"bad": torch.full((9, HIDDEN), torch.nan), "a": torch.randn(3, HIDDEN), "b": torch.randn(6, HIDDEN)}
    generation = Generation(stack, params, tokens)
    with torch.no_grad():
        generation.step({"bad": 9, "a": 2})
        params.evict("bad")
        generation.step({"b": 5, "a": 1})
        generation.step({"b": 1})
    for name in "ab":
        torch.testing.assert_close(generation.output(name), whole(stack, tokens[name]), **CLOSE)


@pytest.mark.parametrize("qkv_format", FORMATS)
def test_inference_mode_gives_the_bytes_of_no_grad_and_both_may_take_turns(qkv_format):
    stack, schedule = Stack(qkv_format), SCHEDULES["joining and leaving"]
    tokens = {name: torch.randn(20, HIDDEN) for name in "abcd"}
    results = []
    for contexts in ([torch.no_grad] * 6, [torch.inference_mode] * 6, [torch.inference_mode, torch.no_grad] * 3):
        generation = Generation(stack, cache(qkv_format=qkv_format), tokens)
        for step, context in zip(schedule, contexts, strict=True):
            with context():
                generation.step(step)
        results.append([generation.output(name) for name in "abcd"])
    for other in results[1:]:
        assert all(torch.equal(found, expected) for found, expected in zip(other, results[0], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_that_was_reset_starts_anew(layout):
    stack, params = Stack(), cache(**LAYOUTS[layout])
    assert params.nbytes == 0
    generate(stack, params, SCHEDULES["a ragged batch"])
    whole_cache = LAYERS * 4 * LONGEST * GROUPS * 2 * CHANNELS * 4
    assert params.nbytes == whole_cache
    params.reset()
    assert (params.nbytes, params.batch_size) == (0, 0)
    generation = generate(stack, params, SCHEDULES["one, token by token"])
    torch.testing.assert_close(generation.output("a"), whole(stack, generation.tokens["a"]), **CLOSE)


def test_a_smaller_number_of_pages_serves_sequences_that_fit():
    stack = Stack()
    params = cache(is_paged=True, page_size=4, total_num_pages=5)
    generation = generate(stack, params, [{"a": 9}, {"a": 1, "b": 7}, {"b": 1, "c": 11}])
    assert params.nbytes == LAYERS * 20 * GROUPS * 2 * CHANNELS * 4
    for name, tokens in generation.tokens.items():
        torch.testing.assert_close(generation.output(name), whole(stack, tokens), **CLOSE)


def test_lengths_are_told_as_transformer_engine_tells_them():
    params = cache()
    params.pre_step({"a": 3, "b": 5})
    params.step(1, torch.zeros(2, 5, GROUPS, CHANNELS), torch.zeros(2, 5, GROUPS, CHANNELS), "bshd")
    params.pre_step({"b": 1, "c": 4, "a": 0})
    assert params.get_seqlens_pre_step().tolist() == [5, 0, 3]
    assert params.cu_seqlens_q.tolist() == [0, 1, 5, 5]
    assert params.cu_seqlens_kv.tolist() == [0, 6, 10, 13]
    assert dict(params.sequences) == {"b": 6, "c": 4, "a": 3}
    assert params.get_seqlens_pre_step().dtype == params.cu_seqlens_q.dtype == torch.int32
    assert "3 of 4 sequences of up to 24 tokens" in repr(params)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_sequences_are_read_where_they_lie_and_torchs_kernels_attend(layout, monkeypatch):
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs),
    )
    params = cache(**LAYOUTS[layout])
    generate(Stack(), params, SCHEDULES["a batch of equals"])
    assert len(calls) == LAYERS * len(SCHEDULES["a batch of equals"])
    owners = {tensor.data_ptr() for layer in params._layers.values() for tensor in (layer.keys, layer.values)}
    shared = [args[1].untyped_storage().data_ptr() in owners for args in calls]
    assert all(shared) if layout == "rows" else not all(shared)


def test_heads_of_a_layer_that_the_cache_is_not_for_are_refused():
    attention = te.DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", layer_number=1)
    params = cache()
    params.pre_step({"a": 2})
    tokens = torch.zeros(1, 2, HEADS, CHANNELS)
    with pytest.raises(ValueError, match=r"keys: got torch.float32 \(1, 2, 4, 8\).*\[1, at least 2, 2, 8\]"):
        attention(tokens, tokens, tokens, inference_params=params)
