"""replace_raw_data: codes in a buffer of the caller's, the values as they were."""

from __future__ import annotations

import copy

import pytest
import torch

import te_hal.modules as te
from te_hal.quantization import replace_raw_data
from te_hal.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from te_hal.schema.errors import ArgumentError

RECIPES = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling]


def weights(recipe):
    with te.quantized_model_init(recipe=recipe()):
        return torch.nn.Sequential(te.Linear(64, 64, bias=False), te.Linear(64, 128, bias=False))


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_in_one_buffer_compute_as_before(recipe):
    model = weights(recipe)
    model.to(torch.bfloat16)
    twin, x = copy.deepcopy(model), torch.randn(32, 64, dtype=torch.bfloat16)
    parameters = list(model.parameters())
    sizes = [parameter._rowwise_data.numel() for parameter in parameters]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8)
    for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
        others = parameter.quantized_storage.tensors()[1:]
        replace_raw_data(parameter, part.view(parameter._rowwise_data.shape))
        assert parameter._rowwise_data.data_ptr() == part.data_ptr()
        assert all(one is other for one, other in zip(others, parameter.quantized_storage.tensors()[1:], strict=True))
    with te.autocast(recipe=recipe()):
        assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("recipe", [Float8CurrentScaling, MXFP8BlockScaling])
def test_an_optimizer_writes_into_the_buffer(recipe):
    weight = weights(recipe)[0].weight
    buffer = torch.empty_like(weight._rowwise_data)
    replace_raw_data(weight, buffer)
    codes = buffer.clone()
    with torch.no_grad():
        weight.add_(1.0)
    assert not torch.equal(buffer, codes)
    assert torch.equal(buffer, weight._rowwise_data)


CODES = torch.zeros(64, 64, dtype=torch.uint8)
REFUSED = {
    "dtype": (CODES.int(), "got torch.int32"),
    "shape": (CODES[:32], r"got torch.uint8 \(32, 64\)"),
    "strides": (CODES.t(), "strided"),
    "device": (CODES.to("meta"), "on meta"),
    "no tensor": ([], "got a list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_buffer_that_does_not_fit_is_refused_and_nothing_changes(case):
    given, message = REFUSED[case]
    weight = weights(Float8CurrentScaling)[0].weight
    held = weight._rowwise_data
    with pytest.raises(ArgumentError, match=f"replace_raw_data: new_raw_data: .*{message}"):
        replace_raw_data(weight, given)
    assert weight._rowwise_data is held


def test_what_has_no_rowwise_codes_is_refused():
    with pytest.raises(TypeError, match="replace_raw_data: tensor: got a Tensor"):
        replace_raw_data(CODES, CODES)
    q = te.MXFP8Quantizer(te.DType.kFloat8E4M3, rowwise=False)(torch.randn(64, 64))
    with pytest.raises(ArgumentError, match="a tensor with a rowwise copy"):
        replace_raw_data(q, CODES)
