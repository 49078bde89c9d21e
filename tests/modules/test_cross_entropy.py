"""parallel_cross_entropy against recorded values, and against torch's in float64."""

from __future__ import annotations

import golden_values
import pytest
import torch
from torch.nn.functional import cross_entropy

import te_hal.modules as te
from te_hal.modules import cross_entropy as module

RECORDED = golden_values.load("functional")


@pytest.mark.parametrize("case", RECORDED.cases("xent/"))
def test_recorded_losses_and_gradients_are_reproduced(case):
    values = RECORDED.case(case)
    x = values["x"].clone().requires_grad_()
    y = te.parallel_cross_entropy(x, values["t"])
    gradient = torch.autograd.grad(y.sum(), x)[0]
    assert (y - values["y"]).norm() <= 1e-6 * values["y"].norm()
    assert (gradient - values["gx"]).norm() <= 1e-6 * values["gx"].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduce", [False, True], ids=["each", "mean"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_losses_and_gradients_are_torchs_in_float64_and_logits_stay_as_they_are(dtype, smoothing, reduce, layout):
    x = (torch.randn(2, 3, 11) * 3).to(dtype)
    x = {"contiguous": x, "transposed": x.transpose(0, 1), "sliced": x.repeat(1, 1, 2)[..., 5:16]}[layout]
    x = x.detach().requires_grad_()
    before = x.detach().clone()
    target = torch.randint(0, 11, x.shape[:-1])
    target[0, 1] = target[1, 0] = -100
    loss = te.parallel_cross_entropy(x, target, label_smoothing=smoothing, reduce_loss=reduce)
    exact = x.detach().double().requires_grad_()
    reduction = "mean" if reduce else "none"
    expected = cross_entropy(exact.flatten(0, 1), target.flatten(), reduction=reduction, label_smoothing=smoothing)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss.double().flatten(), expected.flatten(), rtol=1e-6, atol=1e-6)
    (3 * loss.sum()).backward()
    (3 * expected.sum()).backward()
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert x.grad.dtype == dtype
    assert torch.allclose(x.grad.double(), exact.grad, rtol=step, atol=1e-6 if dtype == torch.float32 else 1e-5)
    assert not x.grad[target == -100].any()
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_an_ignored_row_gives_exactly_zero_whatever_its_logits(junk):
    x = torch.randn(4, 7)
    x[2] = junk
    x.requires_grad_()
    loss = te.parallel_cross_entropy(x, torch.tensor([1, 2, 5, 6]), ignore_idx=5, label_smoothing=0.1)
    loss.sum().backward()
    assert loss[2] == 0
    assert not x.grad[2].any()
    assert x.grad.isfinite().all()


def test_nothing_but_ignored_rows_gives_a_mean_of_zero():
    x = torch.randn(4, 7, requires_grad=True)
    loss = te.parallel_cross_entropy(x, torch.full((4,), -100), reduce_loss=True)
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


def test_any_number_of_rows_at_a_time_gives_the_same(monkeypatch):
    x, target = torch.randn(9, 7, requires_grad=True), torch.randint(0, 7, (9,))
    whole = te.parallel_cross_entropy(x, target)
    expected = torch.autograd.grad(whole.sum(), x)[0]
    monkeypatch.setattr(module, "_AT_ONCE", 15)
    parts = te.parallel_cross_entropy(x, target)
    assert torch.equal(parts, whole)
    assert torch.equal(torch.autograd.grad(parts.sum(), x)[0], expected)


def test_the_older_name_of_the_logits_warns_and_works():
    x, target = torch.randn(3, 5), torch.tensor([1, 2, 3])
    with pytest.warns(DeprecationWarning, match="_input is the older name of inp"):
        found = te.parallel_cross_entropy(None, target, _input=x)
    assert torch.equal(found, te.parallel_cross_entropy(x, target))


X, TARGET = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
WRONG = {
    "target's shape": ({"target": TARGET[0]}, r"got inp \(2, 3, 5\).*target \(3,\)"),
    "target's dtype": ({"target": TARGET.float()}, "target .* of torch.float32"),
    "dtype": ({"inp": X.double()}, "got inp .*torch.float64"),
    "a class too high": ({"target": TARGET + 5}, "target: got 5, one of 6 that are no class; accepted: from 0 to 4"),
    "a negative class": ({"target": TARGET - 1}, "target: got -1"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing: got 1.5; accepted: a number from 0 to 1"),
    "reduce": ({"reduce_loss": 1}, "reduce_loss: got 1"),
    "capturable": ({"is_cg_capturable": None}, "is_cg_capturable: got None"),
    "ignored": ({"ignore_idx": None}, "ignore_idx: got None"),
    "process group": ({"dist_process_group": object()}, "dist_process_group: got <object.*; accepted: None"),
    "both names": ({"_input": X}, "_input: got both"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_cannot_be_is_refused_by_name(which):
    arguments, message = WRONG[which]
    with pytest.raises((ValueError, NotImplementedError), match=f"parallel_cross_entropy.*{message}"):
        te.parallel_cross_entropy(**{"inp": X, "target": TARGET, **arguments})


def test_what_is_no_plain_tensor_is_a_type_error():
    quantized = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(X)
    for inp in (X.tolist(), quantized):
        with pytest.raises(TypeError, match="parallel_cross_entropy: got a"):
            te.parallel_cross_entropy(inp, TARGET)


def test_second_derivatives_are_refused():
    x = X.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="parallel_cross_entropy: backward: got create_graph=True"):
        torch.autograd.grad(te.parallel_cross_entropy(x, TARGET).sum(), x, create_graph=True)
