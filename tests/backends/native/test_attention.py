"""Attention on the native backends: recorded values, rows with nothing to see, and the kernel that torch takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attention_by_hand as by_hand
import golden_values
import pytest
import torch
from closeness import relative_error
from torch.nn.attention import SDPBackend

import te_hal.modules as te

if TYPE_CHECKING:
    from native_backends import NativeBackend

RECORDED = golden_values.load("functional")
MASKS = {"no_mask": "no_mask", "causal_gqa": "causal", "padding": "padding"}
OUTPUT, GRADIENT = 4e-3, 6e-3  # bounds of the recorded values' README
FORMS = {"chosen": False, "written_out": True}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("case", MASKS)
def test_recorded_attention_and_its_gradients_are_met(native: NativeBackend, case, form):
    values = {name: native.put(value) for name, value in RECORDED.case(f"dpa/{case}").items()}
    module = te.DotProductAttention(4, 32, num_gqa_groups=values["k"].shape[2], attn_mask_type=MASKS[case])
    module.always_written_out = form
    inputs = [values[name].requires_grad_() for name in "qkv"]
    with native.use():
        y = module(*inputs, attention_mask=values.get("attention_mask"))
        y.backward(values["gy"])
    assert relative_error(y, values["y"]) <= OUTPUT
    for name, tensor in zip("qkv", inputs, strict=True):
        assert relative_error(tensor.grad, values[f"g{name}"]) <= GRADIENT, name


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 4e-6), (torch.bfloat16, 6e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "arbitrary", "causal", "causal_bottom_right"])
def test_masks_mean_what_their_definition_says_and_rows_with_nothing_to_see_give_zero(
    native: NativeBackend, mask_type, dtype, bound
):
    queries, keys = (6, 6) if mask_type.startswith("padding") else (6, 5)
    query, key, value = (torch.randn(n, 2, h, 8, dtype=dtype) for n, h in ((queries, 4), (keys, 2), (keys, 2)))
    mask = None
    if not mask_type.startswith("causal"):
        shape = (2, 1, 1, queries) if mask_type.startswith("padding") else (2, 1, queries, keys)
        mask = torch.rand(shape) < 0.4
        mask[1] = True
    module = te.DotProductAttention(4, 8, num_gqa_groups=2, attn_mask_type=mask_type)
    inputs = [native.put(tensor).requires_grad_() for tensor in (query, key, value)]
    gy = torch.randn(queries, 2, 32, dtype=dtype)
    with native.use():
        y = module(*inputs, attention_mask=native.put(mask))
        y.backward(native.put(gy))
    doubles = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    seen = by_hand.visible(mask_type, (2, 4, queries, keys), mask)
    first = [by_hand.heads_first(tensor, "sbhd") for tensor in doubles]
    expected = by_hand.merged(by_hand.attend(*first, seen, 8**-0.5), "sbhd")
    exact = [expected, *torch.autograd.grad(expected, doubles, gy.double())]
    for found, target in zip([y, *(tensor.grad for tensor in inputs)], exact, strict=True):
        assert relative_error(found.cpu(), target) <= bound
    assert not y.cpu()[~seen.any(-1).all(1).t()].any()


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
@pytest.mark.parametrize(
    "mask_type", ["no_mask", "causal", "causal_bottom_right", "padding_causal", "padding_causal_bottom_right"]
)
def test_windows_biases_and_offsets_mean_what_their_definition_says(native: NativeBackend, mask_type, softmax_type):
    queries, keys, window = 5, 7, (2, 1)
    mask = None
    if mask_type.startswith("padding"):
        mask = torch.zeros(2, 1, 1, queries, dtype=torch.bool), torch.zeros(2, 1, 1, keys, dtype=torch.bool)
        mask[0][1, ..., -2:], mask[1][1, ..., -3:] = True, True
    module = te.DotProductAttention(
        4, 8, 2, attn_mask_type=mask_type, window_size=window, softmax_type=softmax_type, return_max_logit=True
    )
    inputs = [torch.randn(n, 2, h, 8) for n, h in ((queries, 4), (keys, 2), (keys, 2))]
    inputs += [torch.randn(1, 4, queries, keys), torch.randn(4)][: 1 + (softmax_type == "learnable")]
    given = [native.put(tensor).requires_grad_() for tensor in inputs]
    if softmax_type == "learnable":
        module.softmax_offset = torch.nn.Parameter(given[4].detach())
        given[4] = module.softmax_offset
    with native.use():
        y, largest = module(
            *given[:3],
            native.put(mask) if mask is None else tuple(map(native.put, mask)),
            core_attention_bias_type="post_scale_bias",
            core_attention_bias=given[3],
        )
        found = [y, *torch.autograd.grad(y.sum(), given)]
    doubles = [tensor.double().requires_grad_() for tensor in inputs]
    seen = by_hand.visible(mask_type, (2, 4, queries, keys), mask, window)
    first = [by_hand.heads_first(tensor, "sbhd") for tensor in doubles[:3]]
    joins = doubles[4] if softmax_type == "learnable" else None
    after = doubles[3].expand(2, -1, -1, -1)
    expected = by_hand.merged(by_hand.attend(*first, seen, 8**-0.5, after=after, joins=joins), "sbhd")
    exact = [expected, *torch.autograd.grad(expected.sum(), doubles)]
    for value, target in zip(found, exact, strict=True):
        assert (value.cpu().double() - target).norm() <= 4e-6 * max(1.0, expected.norm(), target.norm())
    assert largest.isfinite().all()


def test_torch_takes_the_first_kernel_that_the_backend_asks_for(native: NativeBackend, monkeypatch):
    asked = []
    original = torch.nn.functional.scaled_dot_product_attention

    def noting(query, key, value, **kwargs):
        asked.append(SDPBackend(torch._fused_sdp_choice(query, key, value, is_causal=kwargs["is_causal"])).name)
        return original(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    module = te.DotProductAttention(4, 64)
    inputs = [native.put(torch.randn(128, 2, 4, 64).bfloat16()).requires_grad_() for _ in range(3)]
    with native.use():
        module(*inputs)
        wanted = module.choice(*inputs).kernels
    assert asked == list(wanted[:1] or ["FLASH_ATTENTION"])
