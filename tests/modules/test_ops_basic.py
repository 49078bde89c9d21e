"""Ops of te.ops that run alone: against float64 in plain torch, and against torch's modules."""

from __future__ import annotations

import math

import closeness
import pytest
import torch
from activation_reference import clamped_swiglu, in_plain_torch

import te_hal.modules as te
from te_hal import recipe

OF = te.ops
#: Op and the formula's name among those of tests/activation_reference.py.
ACTIVATIONS = {
    "GELU": "gelu",
    "QGELU": "qgelu",
    "ReLU": "relu",
    "SReLU": "srelu",
    "SiLU": "silu",
    "GEGLU": "geglu",
    "GLU": "glu",
    "QGEGLU": "qgeglu",
    "ReGLU": "reglu",
    "SReGLU": "sreglu",
    "SwiGLU": "swiglu",
}


def situglu(x, beta1=4.0, beta2=25.0):
    a, b = x.chunk(2, dim=-1)
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def l2(x, eps=1e-6):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


#: Name of a case to op and what it computes of a float64 tensor.
FUNCTIONS = {
    **{kind: (getattr(OF, kind)(), lambda x, name=name: in_plain_torch(name, x)) for kind, name in ACTIVATIONS.items()},
    "ClampedSwiGLU": (OF.ClampedSwiGLU(limit=1.0), lambda x: clamped_swiglu(*x.chunk(2, -1), 1.0, 1.702)),
    "SiTUGLU": (OF.SiTUGLU(), situglu),
    "SiTUGLU tight": (OF.SiTUGLU(beta1=0.5, beta2=1), lambda x: situglu(x, 0.5, 1.0)),
    "L2Normalization": (OF.L2Normalization(eps=1e-3, seq_length=4, micro_batch_size=2), lambda x: l2(x, 1e-3)),
    "Identity": (OF.Identity(), lambda x: x),
    "Reshape": (OF.Reshape([-1, 4, 4]), lambda x: x.reshape(-1, 4, 4)),
    "ConstantScale": (OF.ConstantScale(-0.5), lambda x: x * -0.5),
    "Dropout of nothing": (OF.Dropout(0.0), lambda x: x),
    "Dropout in evaluation": (OF.Dropout(0.5).eval(), lambda x: x),
    "LayerNorm": (OF.LayerNorm(16), lambda x: torch.nn.functional.layer_norm(x, (16,))),
    "RMSNorm of two sizes": (OF.RMSNorm((3, 16)), lambda x: x * torch.rsqrt((x * x).mean((-2, -1), True) + 1e-5)),
    "zero-centered": (OF.LayerNorm(16, zero_centered_gamma=True), lambda x: torch.nn.functional.layer_norm(x, (16,))),
    "Quantize outside of autocast": (OF.Quantize(forward=True, backward=True), lambda x: x),
}


def pairs(function, x, *extra):
    """Result and gradients of all inputs, for the sum of the result times fixed numbers."""
    given = [each.detach().clone().requires_grad_() for each in (x, *extra)]
    y = function(*given)
    weights = torch.linspace(-1, 1, y.numel()).bfloat16().view(y.shape).to(y.dtype)  # exact in every dtype
    (y * weights).sum().backward()
    return [y.detach(), *(each.grad for each in given)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_result_and_gradient_are_those_of_float64(name, dtype):
    op, function = FUNCTIONS[name]
    op = op.to(dtype)
    x = torch.randn(2, 3, 16, dtype=dtype)
    found, exact = pairs(op, x), pairs(function, x.double())
    assert [each.dtype for each in found] == [dtype, dtype]
    bound = 3e-6 if dtype == torch.float32 else 8e-3
    assert all(
        a.shape == b.shape and closeness.relative_error(a, b) <= bound for a, b in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize(
    ("op", "function"),
    [
        (OF.ScaledSwiGLU(), lambda x: in_plain_torch("swiglu", x)),
        (OF.ScaledSReLU(), lambda x: in_plain_torch("srelu", x)),
        (OF.ScaledClampedQGeGLU(limit=2.0), lambda x: clamped_swiglu(*x.chunk(2, -1), 2.0, 1.702)),
        (OF.ScaledSiTUGLU(beta1=2), lambda x: situglu(x, 2.0)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_scaled_kinds_multiply_each_row_by_its_number(op, function):
    x, scales = torch.randn(6, 16), torch.rand(6)
    found = pairs(op, x, scales)
    exact = pairs(lambda a, s: function(a) * s[:, None], x.double(), scales.double())
    assert all(closeness.relative_error(a, b) <= 3e-6 for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("kind", [OF.SwiGLU, OF.ClampedSwiGLU, OF.SiTUGLU, OF.ScaledSwiGLU], ids=lambda k: k.__name__)
def test_interleaved_halves_are_blocks_of_gate_and_linear_part_in_turn(kind):
    x, extra = torch.randn(6, 16), ([torch.rand(6)] if kind is OF.ScaledSwiGLU else [])
    columns = torch.tensor([0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15])
    found = pairs(kind(glu_interleave_size=2), x, *extra)
    wanted = pairs(lambda a, *rest: kind()(a[:, columns], *rest), x, *extra)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("op", [OF.GELU, OF.SwiGLU, OF.SiTUGLU], ids=lambda k: k.__name__)
def test_an_input_kept_in_fp8_takes_a_byte_an_element_and_gives_the_gradient_of_the_rounded_input(op):
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        op(cache_quantized_input=True)(x.clone().requires_grad_())
    found = pairs(op(cache_quantized_input=True), x)
    assert sum(t.numel() * t.element_size() for t in kept) <= x.numel() + 4
    quantizer = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, torch.device("cpu"))
    rounded = quantizer(x).dequantize(dtype=torch.bfloat16)
    assert torch.equal(found[0], op()(x))
    assert torch.equal(found[1], pairs(op(), rounded)[1])


def test_dropout_drops_its_share_and_scales_up_the_rest():
    torch.manual_seed(0)
    y = OF.Dropout(0.25)(torch.ones(4096))
    assert y.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert abs((y == 0).float().mean() - 0.25) < 0.03


def test_bias_is_added_and_its_gradient_is_the_sum_of_rows():
    op, x = OF.Bias(16), torch.randn(2, 3, 16)
    torch.nn.init.normal_(op.bias)
    y, gx = pairs(op, x)
    weights = torch.linspace(-1, 1, 96).bfloat16().view(2, 3, 16).float()
    assert torch.equal(y, x + op.bias)
    assert torch.equal(gx, weights)
    torch.testing.assert_close(op.bias.grad, weights.sum((0, 1)))


def test_a_residual_leaves_by_make_extra_output_and_comes_back_by_add_extra_input():
    linear = OF.Linear(16, 16)
    model = OF.Sequential(OF.MakeExtraOutput(), linear, OF.ReLU())
    x = torch.randn(8, 16, requires_grad=True)
    y, residual = model(x)
    out = OF.Sequential(OF.Identity(), OF.AddExtraInput())(y, residual)
    plain = torch.nn.functional.linear(x.detach(), linear.weight, linear.bias).relu() + x.detach()
    torch.testing.assert_close(out, plain)
    out.sum().backward()
    assert x.grad.shape == x.shape


def test_modules_between_ops_see_tensors_and_extras_go_to_the_ops_in_order():
    class Halve(torch.nn.Module):
        def forward(self, x):
            return x / 2

    model = OF.Sequential({"add": OF.AddExtraInput(), "halve": Halve(), "again": OF.AddExtraInput()})
    x, one, two = (torch.full((2, 4), value) for value in (1.0, 3.0, 10.0))
    assert torch.equal(model(x, one, two), torch.full((2, 4), 12.0))
    assert [name for name, _ in model.named_children()] == ["add", "halve", "again"]


def test_sequential_is_indexed_and_changed_as_torchs():
    model = OF.Sequential(OF.Identity(), OF.ConstantScale(2.0))
    model.append(OF.ConstantScale(3.0))
    model.insert(0, OF.ConstantScale(5.0))
    model += [OF.ConstantScale(7.0)]
    x = torch.ones(2, 2)
    assert len(model) == 5
    assert model(x)[0, 0] == 210
    assert (model + [OF.ConstantScale(11.0)])(x)[0, 0] == 2310  # noqa: RUF005 - the operator is what is tested
    assert isinstance(model[1:], OF.Sequential)
    assert model[2:](x)[0, 0] == 42
    assert isinstance(model.pop(0), OF.ConstantScale)
    assert model(x)[0, 0] == 42


def test_weights_start_as_those_of_torch():
    torch.manual_seed(3)
    op = OF.Linear(64, 48)
    torch.manual_seed(3)
    torch_weight = torch.empty(48, 64)
    torch.nn.init.kaiming_uniform_(torch_weight, a=math.sqrt(5))
    assert torch.equal(op.weight, torch_weight)
    assert not op.bias.any()


def test_a_grouped_linear_takes_its_rows_per_group_as_an_extra_input():
    op = OF.GroupedLinear(2, 16, 8)
    for parameter in op.parameters():
        torch.nn.init.normal_(parameter)
    x, sizes = torch.randn(10, 16), torch.tensor([7, 3])
    y = OF.Sequential(op, OF.ConstantScale(2.0))(x, sizes)
    parts = [
        torch.nn.functional.linear(rows, getattr(op, f"weight{i}"), getattr(op, f"bias{i}"))
        for i, rows in enumerate(x.split([7, 3]))
    ]
    torch.testing.assert_close(y, 2 * torch.cat(parts))


def test_a_grouped_linear_scales_the_bias_of_a_row():
    op = OF.GroupedLinear(2, 16, 8, scale_bias=True)
    for parameter in op.parameters():
        torch.nn.init.normal_(parameter)
    x, scales = torch.randn(10, 16), torch.rand(10)
    y = op(x, [7, 3], scales)
    weights = [op.weight0, op.weight1]
    biases = [op.bias0, op.bias1]
    wanted = [
        torch.nn.functional.linear(rows, w) + s[:, None] * b
        for rows, s, w, b in zip(x.split([7, 3]), scales.split([7, 3]), weights, biases, strict=True)
    ]
    torch.testing.assert_close(y, torch.cat(wanted))


@pytest.mark.parametrize("sizes", [[7, 3], torch.tensor([7, 3], dtype=torch.int16)], ids=["list", "int16"])
@pytest.mark.parametrize("bias", [{}, {"single_grouped_bias": True}], ids=["biases", "stacked"])
def test_rows_of_no_group_get_no_bias_however_the_splits_are_given(sizes, bias):
    op = OF.GroupedLinear(2, 16, 8, scale_bias=True, **bias)
    for name in op.bias_names:
        torch.nn.init.ones_(getattr(op, name))
    x, scales = torch.zeros(12, 16), torch.rand(12)
    y, of_x, of_scales = pairs(lambda a, s: op(a, sizes, s), x, scales)
    assert torch.equal(y[:10], scales[:10, None].expand(10, 8))
    assert not any(each[10:].any() for each in (y, of_x, of_scales))
    assert of_scales[:10].all()


def test_a_grouped_linear_refuses_scales_that_nothing_would_read():
    with pytest.raises(ValueError, match="bias_scale: got a value with scale_bias=False; accepted: None"):
        OF.GroupedLinear(2, 16, 8)(torch.randn(10, 16), [7, 3], torch.rand(10))


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (torch.rand(15), r"shape \(15,\)"),
        (torch.rand(16).double(), "float64"),
        (torch.rand(16, 1), r"shape \(16, 1\)"),
        (None, "bias_scale: got a NoneType"),
    ],
    ids=["short", "fp64", "rank", "none"],
)
def test_a_grouped_linear_refuses_scales_that_do_not_fit_before_anything_changes(scales, said):
    op, x = OF.GroupedLinear(2, 16, 8, scale_bias=True), torch.randn(16, 16)
    with te.autocast(recipe=recipe.DelayedScaling()):
        op(x, [8, 8], torch.rand(16))
    before = [state.amax_history.clone() for _, state in op.delayed_states()]
    with te.autocast(recipe=recipe.DelayedScaling()), pytest.raises((ValueError, TypeError), match=said):
        op(x * 100, [8, 8], scales)
    after = [state.amax_history for _, state in op.delayed_states()]
    assert before
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("make", [recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.MXFP8BlockScaling])
def test_quantize_gives_codes_forward_and_backward(make):
    op = OF.Quantize(forward=True, backward=True)
    x = torch.randn(32, 64, requires_grad=True)
    gradients = []
    given = x * 1.0
    given.register_hook(gradients.append)
    with te.autocast(recipe=make()):
        y = op(given)
    assert isinstance(y, te.QuantizedTensor)
    assert closeness.relative_error(y.dequantize(), x.detach()) < 0.04
    y.dequantize().backward(torch.randn(32, 64))
    assert isinstance(gradients[0], te.QuantizedTensor)


def test_torch_autocast_casts_what_a_chain_reads():
    model = OF.Sequential(OF.LayerNorm(16), OF.Linear(16, 32), OF.SwiGLU(), OF.BasicLinear(16, 8))
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    half = OF.Sequential(OF.LayerNorm(16), OF.Linear(16, 32), OF.SwiGLU(), OF.BasicLinear(16, 8)).bfloat16()
    half.load_state_dict(model.state_dict())
    assert torch.equal(y, half(x.detach().bfloat16()))
