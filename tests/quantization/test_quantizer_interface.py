"""What Transformer Engine's callers ask of every quantizer."""

from __future__ import annotations

import pytest
import torch
from custom_recipes import BF16, E4M3, Thousandths
from hybrids import hybrid

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization.unquantized import PythonQuantizer
from te_hal.schema.errors import ArgumentError, StateError, TeHalError, UnsupportedError

#: Each quantizer, the recipe that makes it, and whether casting again gives the same codes and records nothing.
CASES = {
    "delayed": (lambda: te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3), recipe.DelayedScaling, False),
    "current": (lambda: te.Float8CurrentScalingQuantizer(E4M3), recipe.Float8CurrentScaling, True),
    "1x128": (lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1), recipe.Float8BlockScaling, True),
    "128x128": (lambda: te.Float8BlockQuantizer(E4M3), recipe.Float8BlockScaling, True),
    "mxfp8": (lambda: te.MXFP8Quantizer(E4M3), recipe.MXFP8BlockScaling, True),
    "mxfp8 2d": (lambda: te.MXFP8Quantizer(E4M3, with_2d_quantization=True), recipe.MXFP8BlockScaling, True),
    "mtfp8": (lambda: te.MTFP8Quantizer(E4M3), recipe.MTFP8BlockScaling, True),
    "nvfp4": (te.NVFP4Quantizer, recipe.NVFP4BlockScaling, True),
    "nvfp4 stochastic": (lambda: te.NVFP4Quantizer(stochastic_rounding=True), recipe.NVFP4BlockScaling, False),
    "nvfp4 hadamard": (
        lambda: te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
        recipe.NVFP4BlockScaling,
        True,
    ),
    "identity": (te.IdentityQuantizer, recipe.CustomRecipe, True),
    "hybrid": (lambda: hybrid(("mxfp8", "nvfp4")), recipe.CustomRecipe, True),
    "hybrid stochastic": (
        lambda: te.HybridQuantizer(
            rowwise_quantizer=te.IdentityQuantizer(), columnwise_quantizer=te.NVFP4Quantizer(stochastic_rounding=True)
        ),
        recipe.CustomRecipe,
        False,
    ),
}
EVERY = pytest.mark.parametrize("name", CASES)


def data(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape or (32, 64), generator=torch.Generator().manual_seed(3)).to(dtype)


@EVERY
def test_several_tensors_are_quantized_one_by_one(name):
    made = CASES[name][0]()
    tensors = [data(), data(16, 32)]
    torch.manual_seed(0)
    found = made.multi_quantize(tensors)
    torch.manual_seed(0)
    assert all(torch.equal(q.dequantize(), made(x).dequantize()) for q, x in zip(found, tensors, strict=True))


SHAPES = [(), (7,), (3, 5), (16, 16), (32, 64), (2, 8, 16), (0, 16)]


@EVERY
def test_what_is_said_to_be_quantizable_is_what_quantizing_takes(name):
    quantizer = CASES[name][0]()
    for shape in SHAPES:
        for dtype in (torch.float32, BF16, torch.float64, torch.int32):
            tensor = torch.ones(shape).to(dtype)
            try:
                quantizer(tensor)
                taken = True
            except TeHalError:
                taken = False
            assert quantizer.is_quantizable(tensor) is taken, (shape, dtype)
    assert quantizer.is_quantizable(quantizer(data())) is False


@EVERY
def test_it_names_its_recipe_and_whether_casting_again_is_safe(name):
    make, chosen, safe = CASES[name]
    quantizer = make()
    assert quantizer._get_compatible_recipe() is chosen
    assert quantizer.is_requantization_safe() is safe


@EVERY
def test_a_copy_has_the_settings_and_usages_of_its_own(name):
    quantizer = CASES[name][0]()
    other = quantizer.copy()
    other.set_usage(columnwise=False)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    assert (type(other), repr(other)) == (
        type(quantizer),
        repr(quantizer).replace("columnwise_usage=True", "columnwise_usage=False"),
    )
    torch.manual_seed(0)
    found = other(data()).dequantize()
    torch.manual_seed(0)
    assert torch.equal(found, quantizer(data()).dequantize())


@EVERY
def test_an_empty_one_is_filled_without_autograd(name):
    quantizer = CASES[name][0]()
    empty = quantizer.make_empty((32, 64), dtype=BF16)
    torch.manual_seed(0)
    assert quantizer.update_quantized(data(), empty) is empty
    torch.manual_seed(0)
    plain = quantizer.quantize_impl(data().requires_grad_())
    assert not plain.requires_grad
    assert torch.equal(empty.dequantize(), plain.dequantize())


@EVERY
def test_calibrating_records_what_quantizing_records(name):
    one, other = CASES[name][0](), CASES[name][0]()
    one.calibrate(data())
    other(data())
    if name == "delayed":
        assert one.amax == other.amax == data().abs().max()


@EVERY
def test_what_te_hal_does_not_do_is_refused_by_name(name):
    quantizer = CASES[name][0]()
    assert quantizer.optimize_for_gemm is False
    with pytest.raises(UnsupportedError, match="optimize_for_gemm"):
        quantizer.optimize_for_gemm = True
    for method in ("onnx_quantize", "onnx_dequantize"):
        with pytest.raises(UnsupportedError, match=method):
            getattr(quantizer, method)(data())


def test_a_plain_python_quantizer_makes_no_tensors():
    quantizer = PythonQuantizer(Thousandths())
    assert not quantizer.is_requantization_safe()
    for call in (
        lambda: quantizer(data()),
        lambda: quantizer.make_empty((4, 4)),
        lambda: quantizer.multi_quantize([data()]),
    ):
        with pytest.raises(StateError, match="without codes"):
            call()


def test_a_tensors_quantizer_is_replaced_by_one_that_makes_the_same():
    q = te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3)(data())
    with pytest.warns(UserWarning, match="quantized differently"):
        q.update_quantizer(te.Float8CurrentScalingQuantizer(E4M3))
    q.copy_(data())
    assert torch.equal(q.dequantize(), te.Float8CurrentScalingQuantizer(E4M3)(data()).dequantize())
    with pytest.raises(ArgumentError, match="MXFP8Quantizer, which makes something else"):
        q.update_quantizer(te.MXFP8Quantizer(E4M3))
