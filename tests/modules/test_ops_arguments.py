"""What te.ops refuses, by name and before anything has changed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.errors import TeHalError

OF = te.ops
X = torch.randn(32, 32)

#: What is called, and what the message says.
REFUSED = {
    "all-gather": (lambda: OF.AllGather("group"), ["te.ops.AllGather", "one process"]),
    "all-reduce": (
        lambda: OF.AllReduce(None, reduce_in_backward=False),
        ["te.ops.AllReduce", "reduce_in_backward=False"],
    ),
    "reduce-scatter": (OF.ReduceScatter, ["te.ops.ReduceScatter"]),
    "userbuffers": (lambda: OF.BasicLinear(8, 8, userbuffers_options={}), ["BasicLinear: userbuffers_options"]),
    "tensor parallel": (lambda: OF.Linear(8, 8, tensor_parallel_mode="row"), ["Linear: tensor_parallel_mode", "'row'"]),
    "sequence parallel": (lambda: OF.Linear(8, 8, sequence_parallel=True), ["Linear: sequence_parallel"]),
    "parallel bias": (lambda: OF.Bias(8, tensor_parallel=True), ["Bias: tensor_parallel"]),
    "a fusion of one's own": (
        lambda: OF.register_forward_fusion(print),
        ["register_forward_fusion", "docs/porting.md"],
    ),
    "and backward": (lambda: OF.register_backward_fusion(print), ["register_backward_fusion"]),
    "and both": (lambda: OF.register_forward_backward_fusion(print, prepend=True), ["forward_backward_fusion"]),
    "a margin": (lambda: OF.LayerNorm(8, sm_margin=2), ["LayerNorm", "sm_margin"]),
    "no size": (lambda: OF.Linear(0, 8), ["in_features", "positive int"]),
    "no size of a bias": (lambda: OF.Bias(-1), ["Bias: size"]),
    "no flag": (lambda: OF.GELU(cache_quantized_input="yes"), ["GELU: cache_quantized_input", "'yes'"]),
    "no flag of a linear": (lambda: OF.Linear(8, 8, bias=1), ["Linear: bias"]),
    "no block": (lambda: OF.SwiGLU(glu_interleave_size=0), ["SwiGLU: glu_interleave_size"]),
    "no limit": (lambda: OF.ClampedSwiGLU(limit="7"), ["ClampedSwiGLU: activation_params", "'7'"]),
    "no bound": (lambda: OF.SiTUGLU(beta1=0), ["SiTUGLU: beta1", "above 0"]),
    "recompute of an MLP": (lambda: OF.ScaledSwiGLU(activation_recompute_in_mlp=True), ["te.checkpoint"]),
    "no share": (lambda: OF.Dropout(1.5), ["Dropout: p", "1.5"]),
    "no number": (lambda: OF.ConstantScale("2"), ["ConstantScale: scale"]),
    "no module": (lambda: OF.Sequential(OF.Linear(8, 8), 3), ["Sequential", "a int"]),
    "another number of values": (lambda: OF.Reshape((3, 5))(X), ["Reshape: input", "(32, 32)", "(3, 5)"]),
    "no whole number of rows": (lambda: OF.Reshape((-1, 5))(X), ["Reshape: input", "(-1, 5)"]),
    "a limit that is none": (lambda: OF.ClampedSwiGLU(limit=float("nan")), ["activation_params", "limit=nan"]),
    "two unknown sizes": (lambda: OF.Reshape([-1, -1]), ["Reshape: shape"]),
    "scaled bias without bias": (lambda: OF.GroupedLinear(2, 8, 8, bias=False, scale_bias=True), ["scale_bias"]),
    "no op at all": (lambda: OF.FusedOperation([]), ["FusedOperation", "at least one"]),
    "no basic op": (lambda: OF.FusedOperation([torch.nn.ReLU()]), ["FusedOperation", "ReLU"]),
    "a bias for none": (lambda: setattr(OF.Linear(8, 8, bias=False), "bias", X), ["Linear: bias", "bias=True"]),
    "no tensor": (lambda: OF.GELU()([1.0]), ["GELU", "a list"]),
    "no tensor for a chain": (lambda: OF.Linear(8, 8)([1.0]), ["BasicLinear", "a list"]),
    "an odd size": (lambda: OF.SwiGLU()(torch.ones(2, 3)), ["SwiGLU: input", "(2, 3)"]),
    "blocks that do not fit": (lambda: OF.SwiGLU(glu_interleave_size=4)(torch.ones(2, 12)), ["glu_interleave_size"]),
    "a wrong size": (lambda: OF.Linear(8, 8)(X), ["BasicLinear: input", "(32, 32)", "in_features=8"]),
    "a wrong size of a norm": (lambda: OF.Sequential(OF.RMSNorm(8), OF.Linear(8, 8))(X), ["normalized_shape=8"]),
    "a norm that does not fit": (lambda: OF.Sequential(OF.RMSNorm(32), OF.Linear(8, 8))(X), ["in_features=8"]),
    "a gate that does not fit": (lambda: OF.Sequential(OF.SwiGLU(), OF.Linear(32, 8))(X), ["64", "gated"]),
    "a product that does not fit": (lambda: OF.Sequential(OF.Linear(32, 16), OF.Linear(8, 8))(X), ["(32, 16)"]),
    "a front that does not fit": (
        lambda: OF.Sequential(OF.Linear(32, 16), OF.SwiGLU(), OF.Linear(16, 8))(X),
        ["SwiGLU: input", "(32, 16)", "twice in_features"],
    ),
    "an extra input too few": (lambda: OF.Sequential(OF.AddExtraInput())(X), ["got 0", "AddExtraInput"]),
    "an extra input too many": (lambda: OF.Sequential(OF.Identity())(X, X), ["extra inputs", "no op"]),
    "an extra input that does not fit": (
        lambda: OF.Sequential(OF.Linear(32, 8), OF.AddExtraInput(in_place=True))(X, X),
        ["AddExtraInput: extra input", "(32, 8)"],
    ),
    "scales that do not fit": (lambda: OF.ScaledSReLU()(X, torch.ones(3)), ["ScaledSReLU: scales", "(32,)"]),
    "dtypes that do not fit": (lambda: OF.Sequential(OF.RMSNorm(32).half(), OF.Linear(32, 8))(X), ["float16"]),
    "rows of one group's number": (lambda: OF.GroupedLinear(2, 32, 8)(X, [32]), ["m_splits"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name):
    call, words = REFUSED[name]
    with pytest.raises(TeHalError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_size_that_fp8_cannot_take_names_the_op_in_its_model_and_changes_nothing():
    model = OF.Sequential(OF.RMSNorm(32), OF.Linear(32, 64), OF.GELU(), OF.Linear(64, 24), OF.Linear(24, 32))
    before = copy.deepcopy(model.state_dict())
    with te.autocast(recipe=recipe.Float8CurrentScaling()), pytest.raises(ValueError, match=r"4\.basic_ops\.0 of Seq"):
        model(X)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("chosen", [None, recipe.Float8CurrentScaling()], ids=["plain", "fp8"])
def test_writing_over_what_the_backward_reads_is_refused(chosen):
    model = OF.Sequential(OF.RMSNorm(32), OF.Linear(32, 32), OF.AddExtraInput(in_place=True))
    x = torch.randn(32, 32)
    with te.autocast(enabled=chosen is not None, recipe=chosen), pytest.raises(ValueError, match="backward reads"):
        model(x.requires_grad_(), x)
    with torch.no_grad():
        memory = x.detach().clone()
        assert torch.equal(model(memory, memory), memory)


@pytest.mark.parametrize("op", [OF.Linear(32, 8), OF.Bias(32), OF.GELU(), OF.Quantize(backward=True)], ids=str)
def test_second_derivatives_are_refused_by_name(op):
    x = torch.randn(32, 32, requires_grad=True)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = op(x)
    y = y.dequantize() if isinstance(y, te.QuantizedTensor) else y
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_transforms_of_torch_func_are_refused_by_name():
    for op in (OF.Linear(32, 8), OF.Bias(32), OF.GELU()):
        with pytest.raises(NotImplementedError, match="transform"):
            torch.func.vmap(op)(X[None])


def test_a_state_that_transformer_engine_saved_for_an_op_loads():
    arrays = {"scale": torch.tensor([2.0, 4.0]), "history": torch.rand(4, 2)}
    back = {"scale": torch.tensor([8.0]), "history": torch.rand(4, 1)}
    state = {
        "forward": {"recipe": None, "scale_fwd": arrays["scale"], "amax_history_fwd": arrays["history"]},
        "backward": {"recipe": None, "scale_bwd": back["scale"], "amax_history_bwd": back["history"]},
    }
    op = OF.BasicLinear(32, 32)
    op.set_extra_state(torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8))
    forward, backward = op.fp8_meta["scaling_fwd"], op.fp8_meta["scaling_bwd"]
    assert torch.equal(forward.scale[:2], arrays["scale"])
    assert torch.equal(forward.amax_history[:, :2], arrays["history"])
    assert torch.equal(backward.scale[:1], back["scale"])
    assert torch.equal(backward.amax_history[:, :1], back["history"])


@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("normed", [False, True], ids=["linear", "norm_linear"])
def test_an_input_of_another_dtype_is_cast_to_that_of_the_parameters(enabled, normed):
    norm = [te.ops.LayerNorm(32, device="cpu", dtype=torch.bfloat16)] if normed else []
    model = te.ops.Sequential(*norm, te.ops.Linear(32, 16, device="cpu", dtype=torch.bfloat16))
    x = torch.randn(16, 32).requires_grad_()
    cast = x.detach().bfloat16().requires_grad_()
    found = []
    for leaf in (x, cast):
        model.zero_grad()
        with te.autocast(enabled=enabled, recipe=recipe.Float8CurrentScaling()):
            y = model(leaf)
        y.sum().backward()
        found.append([y.detach(), leaf.grad.bfloat16(), *(parameter.grad for parameter in model.parameters())])
    assert found[0][0].dtype is torch.bfloat16
    assert x.grad.dtype is torch.float32
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_parameters_of_two_dtypes_in_a_chain_are_refused_by_name():
    dtypes = (torch.bfloat16, torch.float32)
    model = te.ops.Sequential(*(te.ops.Linear(16, 16, device="cpu", dtype=dtype) for dtype in dtypes))
    with pytest.raises(ValueError, match=r"input of torch\.bfloat16, weight of torch\.float32; accepted: one dtype"):
        model(torch.randn(16, 16))
