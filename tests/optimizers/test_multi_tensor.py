"""Operations on many tensors at once, against torch tensor by tensor in float64."""

from __future__ import annotations

import inspect

import pytest
import torch

from te_hal import optimizers
from te_hal.optimizers import (
    FusedAdam,
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(3, 5), (1,), (70000,), ()]
CHUNK = 2048 * 32


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_scaling_multiplies_in_fp32_and_rounds_once_into_the_targets_dtype(source, target):
    given, out = tensors(source), tensors(target, 1)
    flag = torch.zeros(1, dtype=torch.int32)
    multi_tensor_applier(multi_tensor_scale, flag, [given, out], 0.3)
    for one, other in zip(given, out, strict=True):
        assert torch.equal(other, (one.float() * 0.3).to(target))
    assert flag == 0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_scaling_tells_of_what_is_not_finite_and_writes_all_the_same(value):
    given, out, flag = tensors(), tensors(seed=1), torch.zeros(1, dtype=torch.int32)
    given[1][0] = value
    multi_tensor_scale(CHUNK, flag, [given, out], 2.0)
    assert flag == 1
    assert torch.equal(out[2], given[2] * 2)
    multi_tensor_scale(CHUNK, None, [given, out], 2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_those_of_float64_of_all_and_of_each(dtype):
    given = tensors(dtype)
    total, each = multi_tensor_applier(multi_tensor_l2norm, torch.zeros(1), [given], True)
    exact = torch.stack([tensor.double().norm() for tensor in given])
    assert torch.allclose(each.double(), exact, rtol=1e-5)
    assert torch.allclose(total.double(), exact.norm()[None], rtol=1e-5)
    assert (total.shape, total.dtype) == ((1,), torch.float32)
    scaled, of_each = multi_tensor_unscale_l2norm(CHUNK, None, [given], torch.tensor(0.25), True)
    assert torch.allclose(scaled, total * 0.25)
    assert torch.allclose(of_each, each * 0.25)
    assert multi_tensor_l2norm(CHUNK, None, [given])[1].numel() == 0


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan"), 1e30])
def test_a_norm_that_is_not_finite_sets_the_flag(value):
    given, flag = tensors(), torch.zeros(1, dtype=torch.int32)
    given[2][:2] = value
    total, _ = multi_tensor_l2norm(CHUNK, flag, [given])
    assert bool(flag) is (value != 1.0)
    assert bool(total.isfinite()) is (value == 1.0)


def test_what_is_unscaled_is_so_before_it_is_squared():
    large, small = torch.full((4,), 1e25), torch.full((4,), 1e-25)
    for tensor, inv_scale in ((large, 1e-20), (small, 1e20)):
        flag = torch.zeros(1, dtype=torch.int32)
        total, _ = multi_tensor_unscale_l2norm(CHUNK, flag, [[tensor]], torch.tensor([-inv_scale]))
        assert total.item() == pytest.approx(2 * tensor[0].item() * inv_scale, rel=1e-6)
        assert flag == 0


@pytest.mark.parametrize("mode", [0, 1], ids=["l2", "adamw"])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_adam_are_those_of_the_optimizer(mode, correction, dtype):
    parameters, masters = tensors(dtype), tensors()
    masters = [tensor.to(dtype).float() for tensor in masters]
    first, second = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    own = [torch.nn.Parameter(tensor.clone()) for tensor in parameters]
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = FusedAdam(
        own, **settings, bias_correction=bool(correction), adam_w_mode=bool(mode), master_weights=dtype != torch.float32
    )
    for step in range(1, 4):
        gradients = tensors(dtype, step)
        lists = [gradients, parameters, first, second, *([masters] if dtype != torch.float32 else [])]
        multi_tensor_applier(multi_tensor_adam, None, lists, 1e-2, 0.8, 0.9, 1e-6, step, mode, correction, 0.1)
        for parameter, gradient in zip(own, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        assert all(torch.equal(one, two.detach()) for one, two in zip(parameters, own, strict=True))


def test_a_set_flag_keeps_adam_from_doing_anything():
    lists = [tensors(), tensors(seed=1), tensors(seed=2), [t.abs() for t in tensors(seed=3)]]
    before = [[tensor.clone() for tensor in of] for of in lists]
    multi_tensor_adam(CHUNK, torch.ones(1), lists, 1e-2, 0.8, 0.9, 1e-6, 1, 1, 1, 0.1)
    assert all(torch.equal(a, b) for of, held in zip(lists, before, strict=True) for a, b in zip(of, held, strict=True))


def test_tensors_without_elements_are_left_out_and_nothing_at_all_gives_none():
    empty = [torch.zeros(0), torch.ones(3), torch.zeros(2, 0)]
    assert multi_tensor_applier(multi_tensor_l2norm, None, [empty])[0] == pytest.approx(3**0.5)
    assert multi_tensor_applier(multi_tensor_l2norm, None, [[torch.zeros(0)]]) is None


def test_what_is_called_gets_chunk_size_flag_and_lists():
    flag, lists = torch.zeros(1), [[torch.ones(2)], [torch.ones(2)]]
    found = MultiTensorApply(7)(lambda *given: given, flag, lists, "more")
    assert found[0] == 7
    assert found[1] is flag
    assert [of[0] is given[0] for of, given in zip(found[2], lists, strict=True)] == [True, True]
    assert found[3] == "more"


def test_arguments_are_those_of_transformer_engine():
    head = ["chunk_size", "noop_flag", "tensor_lists"]
    more = {
        multi_tensor_scale: ["scale"],
        multi_tensor_l2norm: ["per_tensor"],
        multi_tensor_unscale_l2norm: ["inv_scale", "per_tensor"],
        multi_tensor_adam: [
            *("lr", "beta1", "beta2", "epsilon", "step", "mode", "bias_correction", "weight_decay"),
        ],
    }
    for function, names in more.items():
        assert list(inspect.signature(function).parameters) == head + names
    assert multi_tensor_applier.chunk_size == CHUNK


ONE = [[torch.ones(2)]]
WRONG = {
    "lengths": (lambda: multi_tensor_scale(1, None, [[torch.ones(2)], []], 1.0), r"got 2 lists of \[1, 0\] tensors"),
    "lists": (lambda: multi_tensor_scale(1, None, ONE, 1.0), r"got 1 lists .*accepted: 2 lists"),
    "none": (lambda: multi_tensor_l2norm(1, None, [[]]), r"got 1 lists of \[0\]"),
    "shapes": (lambda: multi_tensor_scale(1, None, [[torch.ones(2)], [torch.ones(3)]], 1.0), "got shapes .* at 0"),
    "chunk": (lambda: multi_tensor_l2norm(0, None, ONE), "chunk_size: got 0"),
    "apply's chunk": (lambda: MultiTensorApply(None), "chunk_size: got None"),
    "flag": (lambda: multi_tensor_l2norm(1, torch.zeros(2), ONE), r"noop_flag: got shape \(2,\)"),
    "scale": (lambda: multi_tensor_scale(1, None, ONE * 2, "2"), "scale: got '2'"),
    "per_tensor": (lambda: multi_tensor_l2norm(1, None, ONE, 1), "per_tensor: got 1"),
    "inv_scale": (lambda: multi_tensor_unscale_l2norm(1, None, ONE, 0.5), "inv_scale: got 0.5"),
    "step": (lambda: multi_tensor_adam(1, None, ONE * 4, 1.0, 0.9, 0.9, 1e-8, 0, 1, 1, 0.0), "got step=0"),
    "beta": (lambda: multi_tensor_adam(1, None, ONE * 4, 1.0, 1.0, 0.9, 1e-8, 1, 1, 1, 0.0), "beta1: got 1.0"),
    "adam's lists": (
        lambda: multi_tensor_adam(1, None, ONE, 1.0, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0),
        "accepted: 4 or 5 lists",
    ),
    "adam's moments": (
        lambda: multi_tensor_adam(1, None, [*ONE * 3, [torch.ones(2).half()]], 1.0, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0),
        "got moments or masters of torch.float16, torch.float32",
    ),
    "mode": (lambda: multi_tensor_adam(1, None, ONE * 4, 1.0, 0.9, 0.9, 1e-8, 1, [1], 1, 0.0), r"mode=\[1\]"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_cannot_be_is_refused_by_name(which):
    call, message = WRONG[which]
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_list_of_tensors_is_a_type_error():
    for wrong in (None, torch.ones(2), [torch.ones(2)], [["no tensor"]]):
        with pytest.raises(TypeError, match="tensor_lists"):
            multi_tensor_l2norm(1, None, wrong)
        with pytest.raises(TypeError, match="tensor_lists"):
            multi_tensor_adam(1, None, wrong, 1.0, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)


@pytest.mark.parametrize("name", ["multi_tensor_sgd", "multi_tensor_adam_fp8", "multi_tensor_adam_capturable"])
def test_a_kernel_that_is_not_there_names_the_optimizer_that_does_its_work(name):
    with pytest.raises(NotImplementedError, match=rf"te_hal.optimizers.{name}: .*use te.optimizers.Fused(SGD|Adam)"):
        getattr(optimizers, name)
    assert not hasattr(optimizers, name)
