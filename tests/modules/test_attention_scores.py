"""What is added to scores and to the sum under the softmax: biases, ALiBi, offsets; and the largest score."""

from __future__ import annotations

import attention_by_hand as by_hand
import pytest
import torch

import te_hal.modules as te

B, H, D, SQ, SK = 2, 4, 8, 4, 6
SCALE = 0.4
BOUND = 2e-6
BIASES = {"whole": (B, H, SQ, SK), "of heads": (1, H, SQ, SK), "of keys": (B, 1, 1, SK), "one": (1, 1, 1, 1)}
MASKS = ["no_mask", "causal_bottom_right", "padding", "arbitrary"]


def operands(dtype: torch.dtype = torch.float32, keys: int = SK) -> list[torch.Tensor]:
    inputs = [torch.randn(B, length, heads, D, dtype=dtype) for length, heads in ((SQ, H), (keys, 2), (keys, 2))]
    return [tensor.requires_grad_() for tensor in inputs]


def mask_of(mask_type: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Leaves a query without any key."""
    if mask_type == "arbitrary":
        mask = torch.zeros(B, 1, SQ, SK, dtype=torch.bool)
        mask[0, 0, 1], mask[1, 0, :, 2] = True, True
        return mask
    if mask_type == "padding":
        masks = torch.zeros(B, 1, 1, SQ, dtype=torch.bool), torch.zeros(B, 1, 1, SK, dtype=torch.bool)
        masks[0][0, ..., -1], masks[1][1, ..., -2:] = True, True
        return masks
    return None


def exact(inputs: list[torch.Tensor], mask_type: str, **added: torch.Tensor) -> torch.Tensor:
    first = [by_hand.heads_first(tensor, "bshd") for tensor in inputs]
    seen = by_hand.visible(mask_type, (B, H, SQ, inputs[1].shape[1]), mask_of(mask_type))
    return by_hand.merged(by_hand.attend(*first, seen, SCALE, **added), "bshd")


def check(found: torch.Tensor, expected: torch.Tensor, given: list[torch.Tensor], doubles: list[torch.Tensor]) -> None:
    gy = torch.randn_like(found)
    gradients = torch.autograd.grad(found, given, gy)
    targets = torch.autograd.grad(expected, doubles, gy.double())
    for value, target in zip([found, *gradients], [expected, *targets], strict=True):
        assert value.shape == target.shape
        # The gradient of one number for all scores is 0 but for roundings of gy.
        assert (value.double() - target).norm() <= BOUND * max(gy.norm(), target.norm())


def doubled(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def module_of(mask_type: str, **arguments: object) -> te.DotProductAttention:
    return te.DotProductAttention(
        H, D, 2, qkv_format="bshd", attn_mask_type=mask_type, softmax_scale=SCALE, **arguments
    )


@pytest.mark.parametrize("shape", BIASES.values(), ids=list(BIASES))
@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_bias_is_added_before_or_after_the_scale_and_gets_its_gradient(place, mask_type, shape):
    inputs = [*operands(), torch.randn(shape, requires_grad=True)]
    type_ = "pre_scale_bias" if place == "before" else "post_scale_bias"
    y = module_of(mask_type)(
        *inputs[:3], mask_of(mask_type), core_attention_bias_type=type_, core_attention_bias=inputs[3]
    )
    doubles = doubled(inputs)
    expected = exact(doubles[:3], mask_type, **{place: doubles[3].expand(B, H, SQ, SK)})
    check(y, expected, inputs, doubles)


SLOPES = {
    1: [2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2**-i for i in range(1, 9)],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_slopes_of_alibi_are_the_papers(heads):
    query, value = torch.zeros(1, 1, heads, 2), torch.zeros(1, 2, heads, 2)
    value[:, 0, :, 0] = value[:, 1, :, 1] = 1.0
    module = te.DotProductAttention(heads, 2, qkv_format="bshd", attn_mask_type="causal_bottom_right")
    y = module(query, value * 0, value, core_attention_bias_type="alibi").view(heads, 2)
    # One key at distance 1 and one at 0: the quotient of their weights is the exponential of the slope.
    torch.testing.assert_close((y[:, 1] / y[:, 0]).log(), torch.tensor(SLOPES[heads]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slopes", [None, (H,), (B, H)], ids=str)
@pytest.mark.parametrize("bottom_right", [False, True], ids=["top_left", "bottom_right"])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right", "padding", "arbitrary"])
def test_alibi_falls_with_the_distance_from_the_querys_own_place(mask_type, bottom_right, slopes):
    if mask_type.startswith("causal"):
        bottom_right = mask_type.endswith("right")
    inputs = operands()
    given = None if slopes is None else torch.rand(slopes)
    y = module_of(mask_type)(
        *inputs,
        mask_of(mask_type),
        core_attention_bias_type="alibi",
        alibi_slopes=given,
        bottom_right_diagonal=bottom_right,
    )
    chosen = torch.tensor(SLOPES[H]).expand(B, H) if given is None else given.expand(B, H)
    offsets = by_hand.offsets(mask_type, (B, H, SQ, SK), mask_of(mask_type), bottom_right)
    bias = torch.zeros(B, H, SQ, SK, dtype=torch.float64)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in bias.shape)).tolist():
        bias[b, h, i, j] = -chosen[b, h].double() * abs(i + offsets[b] - j)
    doubles = doubled(inputs)
    check(y, exact(doubles, mask_type, after=bias), inputs, doubles)


@pytest.mark.parametrize("bias", [None, "pre_scale_bias", "post_scale_bias"], ids=str)
@pytest.mark.parametrize("mask_type", [*MASKS, "causal"])
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_an_offset_joins_the_sum_under_the_softmax(softmax_type, mask_type, bias):
    inputs = operands()
    module = module_of(mask_type, softmax_type=softmax_type)
    offset = module.softmax_offset
    if softmax_type == "learnable":
        torch.nn.init.normal_(offset)
        inputs.append(offset)
    more = {"core_attention_bias_type": bias, "core_attention_bias": torch.randn(1, H, SQ, SK)} if bias else {}
    y = module(*inputs[:3], mask_of(mask_type), **more)
    doubles = doubled(inputs)
    joins = doubles[3] if softmax_type == "learnable" else torch.zeros(H, dtype=torch.float64)
    added = {"before" if bias == "pre_scale_bias" else "after": more["core_attention_bias"].double()} if bias else {}
    added = {place: value.expand(B, H, SQ, SK) for place, value in added.items()}
    check(y, exact(doubles[:3], mask_type, joins=joins, **added), inputs, doubles)


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_gradients_of_softmax_types_agree_with_finite_differences(softmax_type):
    """In fp32, as the modules compute: over a step of 1e-2 its roundings of 1e-7 are 1e-5 of the quotient."""
    module = te.DotProductAttention(2, 4, qkv_format="bshd", attn_mask_type="causal", softmax_type=softmax_type)
    inputs = [torch.randn(1, 3, 2, 4, requires_grad=True) for _ in range(3)]
    inputs += [module.softmax_offset] if softmax_type == "learnable" else []
    gy = torch.randn(1, 3, 8)
    gradients = torch.autograd.grad(module(*inputs[:3]), inputs, gy)
    for tensor, gradient in zip(inputs, gradients, strict=True):
        for place in range(0, tensor.numel(), 5):
            values = []
            for step in (1e-2, -1e-2):
                with torch.no_grad():
                    tensor.view(-1)[place] += step
                    values.append((module(*inputs[:3]).double() * gy.double()).sum())
                    tensor.view(-1)[place] -= step
            slope = (values[0] - values[1]) / 2e-2
            assert abs(slope - gradient.flatten()[place]) <= 1e-3  # the third derivative's part of a step


def test_offsets_live_where_transformer_engine_has_them():
    learnable = te.DotProductAttention(H, D, softmax_type="learnable")
    assert {name: tuple(p.shape) for name, p in learnable.named_parameters()} == {"softmax_offset": (H,)}
    assert learnable.softmax_offset.dtype == torch.float32
    assert not learnable.softmax_offset.any()
    assert "softmax_offset" in learnable.state_dict()
    off_by_one = te.DotProductAttention(H, D, softmax_type="off-by-one")
    assert [*off_by_one.state_dict()] == ["_extra_state"]
    assert not [*off_by_one.parameters()]
    assert te.DotProductAttention(H, D).softmax_offset is None
    inside = te.MultiheadAttention(32, H, softmax_type="learnable", device="meta")
    assert inside.core_attention.softmax_offset.device.type == "meta"


@pytest.mark.parametrize("bias", [None, "pre_scale_bias", "post_scale_bias"], ids=str)
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
@pytest.mark.parametrize("mask_type", [*MASKS, "causal"])
def test_the_largest_score_is_that_of_the_keys_that_are_seen(mask_type, softmax_type, bias):
    inputs = operands()
    module = module_of(mask_type, return_max_logit=True, softmax_type=softmax_type)
    added = torch.randn(1, H, SQ, SK) * 4
    more = {"core_attention_bias_type": bias, "core_attention_bias": added} if bias else {}
    y, largest = module(*inputs, mask_of(mask_type), **more)
    plain = module_of(mask_type, softmax_type=softmax_type)(*inputs, mask_of(mask_type), **more)
    torch.testing.assert_close(y, plain)
    query, key = (by_hand.heads_first(tensor, "bshd").double() for tensor in inputs[:2])
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2)
    scores = scores + added if bias == "pre_scale_bias" else scores
    scores = scores * SCALE + (added if bias == "post_scale_bias" else 0.0)
    seen = by_hand.visible(mask_type, (B, H, SQ, SK), mask_of(mask_type))
    expected = scores.masked_fill(~seen, float("-inf")).amax((0, 2, 3))
    torch.testing.assert_close(largest, expected.float())
    assert not largest.requires_grad
    y.sum().backward()


def test_where_nothing_is_seen_the_largest_score_is_minus_infinity():
    module = te.DotProductAttention(1, 4, attn_mask_type="arbitrary", return_max_logit=True)
    tokens = torch.randn(3, 1, 1, 4)
    y, largest = module(tokens, tokens, tokens, torch.ones(1, 1, 1, 1, dtype=torch.bool))
    assert not y.any()
    assert largest.tolist() == [float("-inf")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_bias_of_another_dtype_is_added_as_it_is_and_gets_a_gradient_of_its_own(dtype):
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in operands()]
    bias = torch.randn(1, H, SQ, SK, requires_grad=True)
    y = module_of("no_mask")(*inputs, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    y.sum().backward()
    assert y.dtype == dtype
    assert bias.grad.dtype == torch.float32
    expected = exact(doubled(inputs), "no_mask", after=bias.detach().double().expand(B, H, SQ, SK))
    assert (y.double() - expected).norm() <= 5e-3 * expected.norm()  # roundings of probabilities and result


BAD = {
    "type": ({"core_attention_bias_type": "relative"}, "core_attention_bias_type: got 'relative'; accepted: 'no_bias'"),
    "missing": ({"core_attention_bias_type": "pre_scale_bias"}, "core_attention_bias: got None; accepted: fp32"),
    "too much": ({"core_attention_bias": torch.zeros(1, 1, 1, 1)}, "core_attention_bias: got a value under"),
    "slopes too much": ({"alibi_slopes": torch.zeros(H)}, "alibi_slopes: got a value under .*'no_bias'"),
    "shape": (
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(H, SQ, SK)},
        r"core_attention_bias: got torch.float32 \(4, 4, 6\).*four dimensions",
    ),
    "size": (
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 3, SQ, SK)},
        r"each size 1 or that of \(2, 4, 4, 6\)",
    ),
    "slopes": (
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.zeros(3)},
        r"alibi_slopes: .*\(4,\) or \(2, 4\)",
    ),
    "learned slopes": (
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.zeros(H, requires_grad=True)},
        "that needs a gradient; .*post_scale_bias",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bias_that_does_not_fit_or_that_nothing_would_read_is_refused(name):
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        module_of("no_mask")(*operands(), **arguments)


@pytest.mark.parametrize("softmax_type", ["softmax", None, 1])
def test_an_unknown_softmax_type_is_refused_at_construction(softmax_type):
    for make in (
        lambda: te.DotProductAttention(H, D, softmax_type=softmax_type),
        lambda: te.MultiheadAttention(32, H, softmax_type=softmax_type),
    ):
        with pytest.raises(ValueError, match=r"softmax_type: got .*'vanilla', 'off-by-one', 'learnable'"):
            make()


@pytest.mark.parametrize(
    ("arguments", "call", "reason"),
    [
        ({"softmax_type": "off-by-one"}, {}, "adds to the sum under the softmax"),
        ({"return_max_logit": True}, {}, "asks for the largest score"),
        ({}, {"core_attention_bias_type": "alibi"}, "alibi is added in fp32"),
    ],
    ids=["softmax", "largest", "bias"],
)
def test_the_choice_says_what_torchs_kernels_lack(arguments, call, reason):
    choice = module_of("no_mask", **arguments).choice(*operands(), **call)
    assert choice.implementation == "written_out"
    assert reason in choice.reason
