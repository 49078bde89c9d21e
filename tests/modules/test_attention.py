"""DotProductAttention's values and gradients: recorded ones, and attention by definition in float64."""

from __future__ import annotations

import attention_by_hand as by_hand
import closeness
import golden_values
import pytest
import torch

import te_hal.modules as te

RECORDED = golden_values.load("functional")
GOLDEN_MASKS = {"no_mask": "no_mask", "causal_gqa": "causal", "padding": "padding"}
GOLDEN_OUTPUT, GOLDEN_GRADIENT = 4e-3, 6e-3  # bounds of the recorded values' README

#: Bounds on norm(found - exact) / norm(exact): a few roundings of each result, probability and score gradient.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
FORMATS = ("sbhd", "bshd")
FORMS = {"chosen": False, "written_out": True}
BATCH, HEADS, QUERIES, CHANNELS = 2, 4, 6, 8


def mask_for(mask_type: str, keys: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Masks that leave some queries without any key; padding of queries and keys differs where their numbers do."""
    if mask_type == "arbitrary":
        mask = torch.rand(BATCH, 1, QUERIES, keys) < 0.4
        mask[1, 0, 2] = True
        return mask
    if not mask_type.startswith("padding"):
        return None
    of_queries = torch.zeros(BATCH, 1, 1, QUERIES, dtype=torch.bool)
    of_queries[1, ..., -2:] = True
    if keys == QUERIES:
        return of_queries
    of_keys = torch.zeros(BATCH, 1, 1, keys, dtype=torch.bool)
    of_keys[0, ..., :1] = True
    return of_queries, of_keys


def operands(qkv_format: str, groups: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values and the output's gradient; values have fewer channels."""
    lead = (QUERIES, BATCH) if qkv_format == "sbhd" else (BATCH, QUERIES)
    lead_keys = (keys, BATCH) if qkv_format == "sbhd" else (BATCH, keys)
    tails = ((*lead, HEADS, CHANNELS), (*lead_keys, groups, CHANNELS), (*lead_keys, groups, CHANNELS - 2))
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in tails]
    return [*inputs, torch.randn(*lead, HEADS * (CHANNELS - 2)).to(dtype)]


def exact(
    inputs: list[torch.Tensor], gy: torch.Tensor, qkv_format: str, seen: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """Output and gradients in float64."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    first = [by_hand.heads_first(tensor, qkv_format) for tensor in doubles]
    output = by_hand.merged(by_hand.attend(*first, seen, scale), qkv_format)
    return [output.detach(), *torch.autograd.grad(output, doubles, gy.double())]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("case", GOLDEN_MASKS)
def test_recorded_attention_and_its_gradients_are_met(case, form):
    values = RECORDED.case(f"dpa/{case}")
    groups = values["k"].shape[2]
    module = te.DotProductAttention(4, 32, num_gqa_groups=groups, attn_mask_type=GOLDEN_MASKS[case])
    module.always_written_out = form
    inputs = [values[name].clone().requires_grad_() for name in "qkv"]
    y = module(*inputs, attention_mask=values.get("attention_mask"))
    y.backward(values["gy"])
    assert closeness.relative_error(y, values["y"]) <= GOLDEN_OUTPUT
    for name, tensor in zip("qkv", inputs, strict=True):
        assert closeness.relative_error(tensor.grad, values[f"g{name}"]) <= GOLDEN_GRADIENT, name


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("keys", [QUERIES, QUERIES - 2, QUERIES + 3], ids="{} keys".format)
@pytest.mark.parametrize("qkv_format", FORMATS)
@pytest.mark.parametrize("mask_type", by_hand.CAUSAL)
def test_every_mask_means_what_its_definition_says(mask_type, qkv_format, keys, form):
    module = te.DotProductAttention(HEADS, (CHANNELS, CHANNELS - 2), num_gqa_groups=2, qkv_format=qkv_format)
    module.always_written_out = form
    *inputs, gy = operands(qkv_format, 2, keys, torch.float32)
    mask = mask_for(mask_type, keys)
    y = module(*inputs, attention_mask=mask, attn_mask_type=mask_type)
    y.backward(gy)
    seen = by_hand.visible(mask_type, (BATCH, HEADS, QUERIES, keys), mask)
    expected = exact(inputs, gy, qkv_format, seen, CHANNELS**-0.5)
    for found, target in zip([y, *(tensor.grad for tensor in inputs)], expected, strict=True):
        assert found.shape == target.shape
        assert closeness.relative_error(found, target) <= BOUNDS[torch.float32]
    nothing_to_see = by_hand.merged(~seen.any(-1, keepdim=True).expand(-1, -1, -1, CHANNELS - 2), qkv_format)
    assert not y[nothing_to_see].any()


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("groups", [1, 2, 4], ids="{} groups".format)
@pytest.mark.parametrize("mask_type", ["causal", "arbitrary"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_dtype_is_within_its_roundings_of_float64(dtype, mask_type, groups, form):
    module = te.DotProductAttention(
        HEADS, (CHANNELS, CHANNELS - 2), num_gqa_groups=groups, attn_mask_type=mask_type, softmax_scale=0.5
    )
    module.always_written_out = form
    *inputs, gy = operands("sbhd", groups, QUERIES, dtype)
    mask = mask_for(mask_type, QUERIES)
    y = module(*inputs, attention_mask=mask)
    y.backward(gy)
    expected = exact(inputs, gy, "sbhd", by_hand.visible(mask_type, (BATCH, HEADS, QUERIES, QUERIES), mask), 0.5)
    for found, target in zip([y, *(tensor.grad for tensor in inputs)], expected, strict=True):
        assert found.dtype == dtype
        assert closeness.relative_error(found, target) <= BOUNDS[dtype]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_a_group_serves_the_heads_that_follow_one_another(form):
    grouped, plain = te.DotProductAttention(HEADS, CHANNELS, num_gqa_groups=2), te.DotProductAttention(HEADS, CHANNELS)
    grouped.always_written_out = form
    query, key, value = torch.randn(5, 2, HEADS, CHANNELS), *torch.randn(2, 5, 2, 2, CHANNELS)
    repeated = (tensor.repeat_interleave(2, dim=2) for tensor in (key, value))
    assert closeness.relative_error(grouped(query, key, value), plain(query, *repeated)) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_masked_keys_have_weight_zero_however_large_the_scores(form):
    query, key = torch.zeros(4, 1, 1, 4), torch.zeros(4, 1, 1, 4)
    query[..., 0], key[..., 0] = 200.0, torch.tensor([-100.0, 50.0, 100.0, 0.0]).view(4, 1, 1)  # scores to +-2e4
    value = torch.eye(4).view(4, 1, 1, 4)
    mask = torch.tensor([False, False, True, True]).view(1, 1, 1, 4)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    module = te.DotProductAttention(1, 4, attn_mask_type="padding", softmax_scale=1.0)
    module.always_written_out = form
    y = module(*inputs, attention_mask=mask)
    y.sum().backward()
    assert torch.equal(y[:2, 0], torch.tensor([[0.0, 1.0, 0.0, 0.0]]).expand(2, 4))
    assert not y[2:].any()
    for tensor in inputs:
        assert tensor.grad.isfinite().all()
        assert not tensor.grad[2:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_with_nothing_to_see_gives_zero_and_takes_no_gradient(dtype):
    module = te.DotProductAttention(2, 8, attn_mask_type="arbitrary", qkv_format="bshd")
    inputs = [torch.randn(2, 5, 2, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    mask[0, 0, 3] = True
    mask[1] = True
    y = module(*inputs, attention_mask=mask)
    y.backward(torch.randn_like(y))
    assert not y[0, 3].any()
    assert not y[1].any()
    assert y[0, :3].any()
    assert not inputs[0].grad[0, 3].any()
    for tensor in inputs:
        assert tensor.grad.isfinite().all()
        assert not tensor.grad[1].any()


@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_no_batch_no_queries_or_no_keys_give_zeros(batch, queries, keys, mask_type):
    module = te.DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type=mask_type)
    inputs = [torch.randn(batch, length, 2, 8, requires_grad=True) for length in (queries, keys, keys)]
    y = module(*inputs)
    y.sum().backward()
    assert y.shape == (batch, queries, 16)
    assert not y.any()
    assert all(not tensor.grad.any() for tensor in inputs)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_only_gradients_asked_for_arrive(form):
    module = te.DotProductAttention(2, 8)
    module.always_written_out = form
    query, key, value = (torch.randn(3, 1, 2, 8) for _ in range(3))
    module(query, key.requires_grad_(), value).sum().backward()
    assert key.grad.any()
    assert query.grad is None
    assert value.grad is None


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_inside_torch_autocast_it_is_the_attention_of_inputs_cast_by_hand(form):
    module = te.DotProductAttention(2, 8)
    module.always_written_out = form
    inputs = [torch.randn(6, 2, 2, 8, requires_grad=True) for _ in range(3)]
    by_cast = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs]
    expected = module(*by_cast)
    expected.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(*inputs)
        y.sum().backward()
    assert torch.equal(y, expected)
    for tensor, other in zip(inputs, by_cast, strict=True):
        assert torch.equal(tensor.grad, other.grad.float())


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_an_fp8_recipe_changes_nothing_and_quantized_inputs_are_dequantized(form):
    module = te.DotProductAttention(2, 16)
    module.always_written_out = form
    inputs = [torch.randn(8, 2, 2, 16, dtype=torch.bfloat16) for _ in range(3)]
    quantizer = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    quantized = [quantizer(tensor) for tensor in inputs]
    plain = module(*inputs)
    with te.autocast():
        assert torch.equal(module(*inputs), plain)
        assert torch.equal(module(*quantized), module(*(tensor.dequantize() for tensor in quantized)))


@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
def test_a_nan_in_a_query_becomes_what_torchs_kernel_makes_of_it_and_nan_where_written_out(mask_type):
    attention = te.DotProductAttention(HEADS, CHANNELS, attn_mask_type=mask_type)
    rows = [torch.randn(BATCH, HEADS, QUERIES, CHANNELS) for _ in range(3)]
    rows[0][:, :, 2] = torch.nan
    torchs = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=mask_type == "causal")
    given = [tensor.permute(2, 0, 1, 3).contiguous() for tensor in rows]
    torch.testing.assert_close(attention(*given), by_hand.merged(torchs, "sbhd"), equal_nan=True)
    attention.always_written_out = True
    written_out = attention(*given).isnan()
    assert written_out[2].all()
    assert not written_out[[0, 1, 3, 4, 5]].any()
