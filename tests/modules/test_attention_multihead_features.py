"""MultiheadAttention around attention's features: norms of queries and keys, packed sequences, windows, biases."""

from __future__ import annotations

import closeness
import pytest
import torch
from multihead import CHANNELS, GROUPS, HEADS, HIDDEN, B, S, made
from norm_reference import normalised

import te_hal.modules as te

FP32_BOUND = 2e-6
NORMS = ["L2Normalization", "RMSNorm", "LayerNorm"]


def seen_by_attention(module: te.MultiheadAttention, *args: torch.Tensor, **kwargs: object) -> list[torch.Tensor]:
    """Queries, keys and values as attention gets them, and the module's result."""
    seen: list[torch.Tensor] = []
    hook = module.core_attention.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    result = module(*args, **kwargs)
    hook.remove()
    return [*seen, result]


def exact_norm(kind: str, norm: torch.nn.Module, tensor: torch.Tensor, eps: float) -> torch.Tensor:
    doubled = tensor.double()
    if kind == "L2Normalization":
        return doubled / (doubled.square().sum(-1, keepdim=True) + eps).sqrt()
    beta = norm.bias.double() if kind == "LayerNorm" else None
    return normalised(doubled, norm.weight.double(), beta, eps, zero_centered=False)


@pytest.mark.parametrize("attention_type", ["self", "cross"])
@pytest.mark.parametrize("before", [False, True], ids=["after_rope", "before_rope"])
@pytest.mark.parametrize("kind", NORMS)
def test_queries_and_keys_are_normalised_head_by_head_before_or_after_they_are_rotated(kind, before, attention_type):
    plain = made(attention_type=attention_type)
    module = made(attention_type=attention_type, qk_norm_type=kind, qk_norm_eps=0.01, qk_norm_before_rope=before)
    module.load_state_dict(plain.state_dict(), strict=False)
    x, angles = torch.randn(S, B, HIDDEN), te.RotaryPositionEmbedding(CHANNELS)(S)
    more = {"encoder_output": torch.randn(S, B, HIDDEN)} if attention_type == "cross" else {}
    query, key, value, _ = seen_by_attention(plain, x, **more)
    found = seen_by_attention(module, x, rotary_pos_emb=angles, **more)
    for tensor, norm, normed in zip((query, key), (module.q_norm, module.k_norm), found[:2], strict=True):
        if before:
            expected = te.apply_rotary_pos_emb(exact_norm(kind, norm, tensor, 0.01), angles)
        else:
            expected = exact_norm(kind, norm, te.apply_rotary_pos_emb(tensor, angles), 0.01)
        assert closeness.relative_error(normed, expected) <= FP32_BOUND
    assert torch.equal(found[2], value)
    found[3].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(("kind", "parameters"), [("L2Normalization", []), ("RMSNorm", ["weight"]), (None, [])])
def test_norms_of_queries_and_keys_have_transformer_engines_names(kind, parameters):
    names = {name for name, _ in made(qk_norm_type=kind).named_parameters()}
    norms = {name for name in names if "_norm." in name}
    assert norms == {f"{which}_norm.{parameter}" for which in "qk" for parameter in parameters}


def test_a_norm_of_bf16_is_computed_in_fp32_and_rounded_once():
    module = made(qk_norm_type="L2Normalization", params_dtype=torch.bfloat16)
    tensor = torch.randn(3, 2, HEADS, CHANNELS).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module.q_norm(tensor)
    expected = exact_norm("L2Normalization", module.q_norm, tensor, 1e-6)
    assert found.dtype == torch.bfloat16
    assert closeness.roundings(found, expected, 1e-6) <= 1


LENGTHS = [4, 1, 6]


@pytest.mark.parametrize("attention_type", ["self", "cross"])
@pytest.mark.parametrize("gap", [0, 2], ids=["gapless", "gaps"])
def test_packed_sequences_are_each_as_they_would_be_alone(gap, attention_type):
    arguments = {"attention_type": attention_type, "window_size": (2, 0), "qk_norm_type": "RMSNorm"}
    packed, alone = made(qkv_format="thd", **arguments), made(**arguments)
    alone.load_state_dict(packed.state_dict())
    starts = torch.tensor([0, *(length + gap for length in LENGTHS)]).cumsum(0)
    x, memory = torch.randn(2, int(starts[-1]), HIDDEN)
    angles = te.RotaryPositionEmbedding(CHANNELS)(8)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    more = {"cu_seqlens_q": ends} | ({"cu_seqlens_q_padded": starts.int()} if gap else {})
    if attention_type == "cross":
        more |= {"cu_seqlens_kv": ends, "encoder_output": memory}
        more |= {"cu_seqlens_kv_padded": starts.int()} if gap else {}
    y = packed(x, rotary_pos_emb=angles, **more)
    assert y.shape == x.shape
    for start, length in zip(starts.tolist(), LENGTHS, strict=False):
        part = slice(start, start + length)
        given = {"encoder_output": memory[part].unsqueeze(1)} if attention_type == "cross" else {}
        expected = alone(x[part].unsqueeze(1), rotary_pos_emb=angles, **given).squeeze(1)
        torch.testing.assert_close(y[part], expected, rtol=1e-4, atol=1e-5)


def test_a_pair_of_masks_and_a_window_serve_cross_attention():
    module = made(attention_type="cross", attn_mask_type="padding", window_size=(1, 1), input_layernorm=True)
    x, memory = torch.randn(S, B, HIDDEN), torch.randn(S + 2, B, HIDDEN)
    masks = torch.zeros(B, 1, 1, S, dtype=torch.bool), torch.zeros(B, 1, 1, S + 2, dtype=torch.bool)
    masks[1][1, ..., -3:] = True
    changed = memory.clone()
    changed[-3:, 1] = 7.0
    assert torch.equal(
        module(x, attention_mask=masks, encoder_output=memory), module(x, attention_mask=masks, encoder_output=changed)
    )
    query, key, value, y = seen_by_attention(module, x, attention_mask=masks, encoder_output=memory)
    attention = te.DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="padding", window_size=(1, 1))
    assert torch.equal(y, module.proj(attention(query, key, value, masks)))


def test_a_bias_and_slopes_reach_attention():
    module = made()
    x = torch.randn(S, B, HIDDEN)
    query, key, value, y = seen_by_attention(module, x, core_attention_bias_type="alibi")
    attention = te.DotProductAttention(HEADS, CHANNELS, GROUPS)
    assert torch.equal(y, module.proj(attention(query, key, value, core_attention_bias_type="alibi")))
    bias = torch.randn(1, HEADS, S, S, requires_grad=True)
    module(x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias).sum().backward()
    assert bias.grad.any()
