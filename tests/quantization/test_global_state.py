"""FP8GlobalStateManager's questions, and the multiple of rows of a recipe."""

from __future__ import annotations

import pytest
import torch

import te_hal
import te_hal.modules as te
from te_hal.quantization import get_align_size_for_quantization, quantizer_factories
from te_hal.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

QUESTIONS = ["is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available"]


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("backend", ["cpu_reference", "null"])
def test_the_manager_always_gives_answer_and_reason(name, backend):
    with te_hal.use_backend(backend):
        found = getattr(te.FP8GlobalStateManager, name)()
        assert found == getattr(te, name)(return_reason=True)
    assert found[0] is not bool(found[1])


def test_the_keys_of_both_directions_are_those_of_a_modules_state():
    module = te.Linear(32, 32)
    assert not module.fp8_meta_tensors_initialized
    with te.autocast(recipe=DelayedScaling()):
        module(torch.randn(16, 32)).sum().backward()
    assert module.fp8_meta_tensors_initialized
    for forward, slots in ((True, 3), (False, 2)):
        key = te.FP8GlobalStateManager.get_meta_tensor_key(forward=forward)
        assert module.fp8_meta[key].scale.shape == (slots,)
        assert len(module.quantizers[key]) == slots


ALIGNMENTS = {
    "delayed": (DelayedScaling(), 16),
    "current": (Float8CurrentScaling(), 16),
    "1x128": (Float8BlockScaling(), 16),
    "mxfp8": (MXFP8BlockScaling(), 32),
    "nvfp4": (NVFP4BlockScaling(), 128),
    "custom": (CustomRecipe(qfactory=quantizer_factories.mxfp8_factory), 128),
    "custom with its own": (CustomRecipe(qfactory=quantizer_factories.mxfp8_factory, quantization_alignment=48), 48),
}


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_padding_goes_to_the_multiple_of_the_recipe(name):
    recipe, multiple = ALIGNMENTS[name]
    assert get_align_size_for_quantization(recipe) == multiple
    with te.autocast(recipe=recipe):
        _, sizes = te.Fp8Padding(2)(torch.randn(20, 32), [17, 3])
    assert sizes == [-(-17 // multiple) * multiple, multiple]
