"""What a cache for generation refuses: sizes, steps that do not fit, overflow, sequences evicted twice."""

from __future__ import annotations

import copy

import pytest
import torch
from generation import CHANNELS, GROUPS, HEADS, LONGEST, Stack, cache

import te_hal.modules as te
from te_hal.schema.errors import TeHalError

NEW = torch.zeros(1, 2, GROUPS, CHANNELS)

CONSTRUCTOR = {
    "batch": ({"max_batch_size": 0}, ValueError, "max_batch_size: got 0"),
    "length": ({"max_sequence_length": 1.5}, ValueError, "max_sequence_length: got 1.5"),
    "heads": ({"num_heads_kv": None}, ValueError, "num_heads_kv: got None"),
    "channels": ({"head_dim_k": -1}, ValueError, "head_dim_k: got -1"),
    "channels of values": ({"head_dim_v": 0}, ValueError, "head_dim_v: got 0"),
    "dtype": ({"dtype": torch.float8_e4m3fn}, ValueError, "dtype: got torch.float8_e4m3fn.*the activation dtype"),
    "no dtype": ({"dtype": None}, ValueError, "dtype: got None"),
    "format": ({"qkv_format": "bhsd"}, ValueError, "qkv_format: got 'bhsd'; accepted: bshd, sbhd, thd"),
    "no page size": ({"is_paged": True}, ValueError, "page_size: got None with is_paged=True"),
    "no pages": ({"page_size": 4}, ValueError, "page_size: got 4 with is_paged=False"),
    "pages alone": ({"total_num_pages": 4}, ValueError, "page_size: got None with .*total_num_pages=4"),
    "flag": ({"is_paged": 1, "page_size": 4}, ValueError, "is_paged: got 1"),
    "own manager": ({"custom_cache_manager": object()}, NotImplementedError, "custom_cache_manager: got .*is_paged"),
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_a_cache_that_cannot_be_is_refused_by_name(name):
    arguments, error, message = CONSTRUCTOR[name]
    given = {
        "max_batch_size": 2,
        "max_sequence_length": 8,
        "num_heads_kv": GROUPS,
        "head_dim_k": CHANNELS,
        "dtype": torch.float32,
        **arguments,
    }
    with pytest.raises(error, match=f"InferenceParams: {message}") as caught:
        te.InferenceParams(**given)
    assert isinstance(caught.value, TeHalError)


ATTENTION = te.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format="bshd", layer_number=1)


def attend(params: te.InferenceParams, tokens: int, batch: int = 1, **arguments: object) -> torch.Tensor:
    query = torch.zeros(batch, tokens, HEADS, CHANNELS)
    key = torch.zeros(batch, tokens, GROUPS, CHANNELS)
    return ATTENTION(query, key, key, inference_params=params, **arguments)


OVERFLOWS = {
    "too long": (
        {},
        {"a": LONGEST - 1},
        {"a": 2},
        "sequence 'a' with 23 tokens and 2 more; accepted: at most max_s.*24",
    ),
    "too many": ({}, {"a": 1}, dict.fromkeys("abcde", 1), "got 5 sequences; accepted: at most max_batch_size=4"),
    "no page": (
        {"is_paged": True, "page_size": 4, "total_num_pages": 3},
        {"a": 8},
        {"a": 1, "b": 1},
        "got 4 pages for 2 sequences of 10 tokens in all; accepted: at most total_num_pages=3 of page_size=4",
    ),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_is_refused_before_anything_has_changed(name):
    arguments, first, second, message = OVERFLOWS[name]
    params = cache(**arguments)
    params.pre_step(first)
    attend(params, max(first.values()))
    before, slots = dict(params.sequences), copy.deepcopy(params._slots.blocks_of)
    with pytest.raises(RuntimeError, match=message) as caught:
        params.pre_step(second)
    assert isinstance(caught.value, TeHalError)
    assert dict(params.sequences) == before
    assert params._slots.blocks_of == slots
    params.pre_step({"a": 0})  # and goes on


def test_a_sequence_is_evicted_once():
    params = cache()
    params.pre_step({"a": 2, "b": 2})
    attend(params, 2, batch=2)
    params.evict("a")
    with pytest.raises(RuntimeError, match="sequence 'a', which was never named or has left already; accepted: 'b'"):
        params.evict("a")
    params.pre_step({"c": 1})
    with pytest.raises(RuntimeError, match=r"evict: got sequence 'b'.*has left with it"):
        params.evict("b")
    with pytest.raises(RuntimeError, match="got sequence 'd'"):
        params.evict("d")
    with pytest.raises(RuntimeError, match=r"evict: got sequence \['a'\]"):
        params.evict(["a"])


def test_a_sequence_that_comes_back_starts_anew():
    params = cache()
    params.pre_step({"a": 5})
    attend(params, 5)
    params.pre_step({"b": 1})
    attend(params, 1)
    params.pre_step({"a": 2})
    assert dict(params.sequences) == {"a": 2}


@pytest.mark.parametrize("new", [-1, 1.0, True, None, 7], ids=repr)
def test_a_number_of_new_tokens_that_is_none_is_refused(new):
    with pytest.raises(ValueError, match=r"pre_step: sequence 'a': got .*from 0 to 6 \(max_ctx_len\)"):
        cache(max_ctx_len=6).pre_step({"a": new})


@pytest.mark.parametrize("step", [[("a", 1)], [8, 8], None, "a"], ids=repr)
def test_a_step_that_names_no_numbers_is_a_type_error(step):
    with pytest.raises(TypeError, match=r"InferenceParams\.pre_step: got a .*accepted: a dict from a sequence's id"):
        cache().pre_step(step)


def test_a_step_of_no_sequence_is_refused():
    with pytest.raises(ValueError, match=r"InferenceParams\.pre_step: got no sequence; .*reset\(\)"):
        cache().pre_step({})


def test_a_forward_without_a_step_and_a_step_without_a_forward_are_refused():
    params = cache()
    with pytest.raises(RuntimeError, match=r"a forward that no pre_step announced; .*pre_step\(\{sequence"):
        attend(params, 1)
    params.pre_step({"a": 1})
    with pytest.raises(RuntimeError, match="a second step before any layer has read the first"):
        params.pre_step({"a": 1})
    attend(params, 1)
    params.evict("a")
    with pytest.raises(RuntimeError, match="no pre_step announced"):
        attend(params, 1)


def test_a_layer_that_missed_a_step_is_refused():
    params = cache()
    for _ in range(2):
        params.pre_step({"a": 1})
        attend(params, 1)
    with pytest.raises(RuntimeError, match=r"of layer 2: got step 2 after step 0: .*not finished by all layers"):
        params.step(2, NEW[:, :1], NEW[:, :1], "bshd")


@pytest.mark.parametrize("arguments", [{}, {"is_paged": True, "page_size": 4}], ids=["rows", "pages"])
def test_two_layers_of_one_number_are_refused_and_copies_have_a_cache_of_their_own(arguments):
    stack, params = Stack(), cache(**arguments)
    params.pre_step({"a": 2})
    tokens = torch.zeros(1, 2, 32)
    with torch.no_grad():
        stack(tokens, inference_params=params)
        other, copied = copy.deepcopy((stack, params))
        params.pre_step({"a": 2})
        copied.pre_step({"a": 2})
        expected = stack(tokens, inference_params=params)
        assert torch.equal(other(tokens, inference_params=copied), expected)
        with pytest.raises(RuntimeError, match=r"layer_number.*got 1, which another module .* has, too"):
            other(tokens, inference_params=params)
        stack.layers[1].core_attention.layer_number = 1
        params.reset()
        params.pre_step({"a": 2})
        with pytest.raises(RuntimeError, match="number the layers from 1"):
            stack(tokens, inference_params=params)


def test_a_loop_of_forwards_after_one_step_is_refused():
    params = cache()
    params.pre_step({"a": 1})
    attend(params, 1)
    with pytest.raises(RuntimeError, match=r"of layer 1: got a second write of step 1: a forward without its own pre"):
        attend(params, 1)
    params.pre_step({"a": 1})  # and goes on
    attend(params, 1)


def test_a_module_that_runs_twice_in_a_step_is_refused_and_shared_weights_in_a_module_each_are_not():
    first = te.MultiheadAttention(32, HEADS, layer_number=1, qkv_format="bshd", name="shared", attention_dropout=0.0)
    second = te.MultiheadAttention(32, HEADS, layer_number=2, qkv_format="bshd", attention_dropout=0.0)
    for name, parameter in first.named_parameters():
        owner, _, own = name.rpartition(".")
        second.get_submodule(owner).register_parameter(own, parameter)
    tokens, params = torch.randn(1, 4, 32), cache(num_heads_kv=HEADS)
    with torch.no_grad():
        params.pre_step({"a": 4})
        hidden = first(tokens, inference_params=params)
        said = r"of layer 1 \(at core_attention of Mul.*a module that runs twice in one.*a module each, with the param"
        with pytest.raises(RuntimeError, match=said):
            first(hidden, inference_params=params)
        params.reset()
        steps = []
        for number in range(4):
            params.pre_step({"a": 1})
            hidden = first(tokens[:, number : number + 1], inference_params=params)
            steps.append(second(hidden, inference_params=params))
        assert torch.allclose(torch.cat(steps, dim=1), first(first(tokens)), atol=1e-5)


@pytest.mark.parametrize("again", [False, True], ids=["the forward alone", "pre_step and forward"])
def test_after_a_forward_that_was_interrupted_the_cache_says_to_start_anew(again):
    stack, params = Stack(), cache()
    tokens = torch.zeros(1, 2, 32)
    stop = stack.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        params.pre_step({"a": 2})
        with pytest.raises(ZeroDivisionError):
            stack(tokens, inference_params=params)
        stop.remove()
        if again:
            params.pre_step({"a": 2})
        with pytest.raises(RuntimeError, match=r"forward that was interrupted, reset\(\) and feed the sequences anew"):
            stack(tokens, inference_params=params)
        params.reset()
        params.pre_step({"a": 2})
        assert stack(tokens, inference_params=params).shape == tokens.shape


CALLS = {
    "no cache": ({"inference_params": {}}, TypeError, "inference_params: got a dict"),
    "mask": (
        {"attention_mask": torch.zeros(1, 1, 1, 2)},
        ValueError,
        "attention_mask: got a value beside inference_par",
    ),
    "lengths": ({"cu_seqlens_q": torch.tensor([0, 2])}, ValueError, "cu_seqlens_q: got a value beside"),
    "diagonal": ({"bottom_right_diagonal": True}, ValueError, "bottom_right_diagonal: got a value beside"),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, ValueError, "attn_mask_type: got 'arbitrary' with inference_params"),
}


@pytest.mark.parametrize(
    ("of_cache", "of_layer", "accepted"), [("bshd", "thd", "'bshd' or 'sbhd'"), ("thd", "sbhd", "'thd'")]
)
def test_packed_tokens_and_a_cache_of_rows_are_refused_and_the_other_way_round(of_cache, of_layer, accepted):
    params = cache(qkv_format=of_cache)
    params.pre_step({"a": 2})
    new = torch.zeros(2, 1, HEADS, CHANNELS).flatten(0, 4 - len(of_layer))
    module = te.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format=of_layer, layer_number=1)
    with pytest.raises(ValueError, match=f"qkv_format: got '{of_layer}'; accepted: {accepted}"):
        module(new, new[..., :GROUPS, :], new[..., :GROUPS, :], inference_params=params)


@pytest.mark.parametrize("name", CALLS)
def test_what_a_cache_answers_itself_is_not_taken_from_the_caller(name):
    arguments, error, message = CALLS[name]
    params = cache()
    params.pre_step({"a": 2})
    tokens = torch.zeros(1, 2, HEADS, CHANNELS)
    module = te.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format="bshd", layer_number=1)
    key = tokens[:, :, :GROUPS]
    with pytest.raises(error, match=message):
        module(**{"query_layer": tokens, "key_layer": key, "value_layer": key, "inference_params": params, **arguments})


@pytest.mark.parametrize("arguments", [{"layer_number": None}, {"attention_type": "cross"}], ids=str)
def test_a_module_without_a_cache_of_its_own_is_refused(arguments):
    params = cache()
    params.pre_step({"a": 2})
    module = te.DotProductAttention(
        GROUPS, CHANNELS, **{"qkv_format": "bshd", "layer_number": 1, "attention_type": "self", **arguments}
    )
    with pytest.raises(ValueError, match=r"inference_params: got layer_number=.*says whose cache it is"):
        module(NEW, NEW, NEW, inference_params=params)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (NEW.double(), r"keys: got torch.float64 \(1, 2, 2, 8\) for new tokens \[2\]; accepted: torch.float32"),
        (NEW[:, :1], r"keys: got .*\(1, 1, 2, 8\).*accepted: .*\[1, at least 2, 2, 8\]"),
        (NEW.expand(2, 2, GROUPS, CHANNELS), r"keys: got .*\(2, 2, 2, 8\).*the batch that pre_step announced"),
        (NEW[..., :4], r"keys: got .*\(1, 2, 2, 4\)"),
        (NEW[0], r"keys: got .*\(2, 2, 8\)"),
    ],
    ids=["dtype", "tokens", "batch", "channels", "rank"],
)
def test_keys_that_the_step_did_not_announce_are_refused(keys, message):
    params = cache()
    params.pre_step({"a": 2})
    with pytest.raises(ValueError, match=message):
        params.step(1, keys, NEW, "bshd")


def test_keys_elsewhere_than_the_layers_cache_or_of_no_layer_are_refused():
    params = cache()
    params.pre_step({"a": 2})
    params.step(1, NEW, NEW, "bshd")
    with pytest.raises(ValueError, match=r"of layer 1: got keys on meta; accepted: cpu.*move the model"):
        params.step(1, NEW.to("meta"), NEW.to("meta"), "bshd")
    with pytest.raises(ValueError, match="layer_number: got 'first'; accepted: a positive int"):
        params.step("first", NEW, NEW, "bshd")
    with pytest.raises(TypeError, match="values: got a list"):
        params.step(1, NEW, [0.0], "bshd")


def test_gradients_are_refused():
    stack, params = Stack(), cache()
    params.pre_step({"a": 2})
    with pytest.raises(RuntimeError, match=r"keys and values that need a gradient; .*torch\.no_grad"):
        stack(torch.zeros(1, 2, 32), inference_params=params)


def test_the_choice_is_asked_without_a_cache():
    module = te.DotProductAttention(GROUPS, CHANNELS, layer_number=1)
    with pytest.raises(ValueError, match="choice: inference_params: got a cache, which a call would change"):
        module.choice(NEW, NEW, NEW, inference_params=cache())
