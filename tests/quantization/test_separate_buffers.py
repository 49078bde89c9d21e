"""Quantized tensors where torch goes to memory without a dispatch: refused by name, or done to their buffers."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.errors import UnsupportedError

RECIPES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
}
REFUSED = {
    "torch.from_dlpack": (torch.from_dlpack, "__dlpack__"),
    "numpy.from_dlpack": (np.from_dlpack, "__dlpack__"),
    "numpy.asarray": (np.asarray, "__array__"),
    "numpy": (lambda w: w.numpy(), "numpy"),
    "numpy by force": (lambda w: w.numpy(force=True), "numpy"),
    "tolist": (lambda w: w.tolist(), "tolist"),
    "apply_": (lambda w: w.apply_(lambda _: 1.0), "apply_"),
    "map_": (lambda w: w.map_(torch.ones(w.shape), lambda _, b: b), "map_"),
    "map2_": (lambda w: w.map2_(torch.ones(w.shape), torch.ones(w.shape), lambda _, b, __: b), "map2_"),
    "storage": (lambda w: w.storage(), "storage"),
    "data_ptr": (lambda w: w.data_ptr(), "data_ptr"),
    "const_data_ptr": (lambda w: w.const_data_ptr(), "const_data_ptr"),
    "pin_memory": (lambda w: w.pin_memory(), "pin_memory"),
}
#: Past the class's own methods: torch's errors.
REFUSED_BY_TORCH = {
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "apply_ of Tensor": lambda w: torch.Tensor.apply_(w, lambda _: 1.0),
    "map_ from it": lambda w: torch.ones(w.shape).map_(w, lambda _, b: b),
    "data_ptr of Tensor": torch.Tensor.data_ptr,
    "an element of its storage": lambda w: w.untyped_storage()[0],
    "its storage in another tensor": lambda w: torch.ones(w.shape).set_(w.untyped_storage()),
    "a copy of its storage": lambda w: w.untyped_storage().clone()[0],
    "memoryview": memoryview,
    "__array_interface__": lambda w: w.__array_interface__,
    "__cuda_array_interface__": lambda w: w.__cuda_array_interface__,
}
#: Reach memory in a plain tensor, and dispatch here.
DISPATCHED = {
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "as_subclass": lambda w: w.as_subclass(torch.Tensor),
    "make_subclass": lambda w: torch.Tensor._make_subclass(torch.Tensor, w),
    "as_strided": lambda w: w.as_strided(w.shape, w.stride()),
    "stack": lambda w: torch.stack([w])[0],
    "set_ from it": lambda w: torch.ones(w.shape).set_(w),
}


def weight(name: str = "current") -> torch.Tensor:
    with te.quantized_model_init(recipe=RECIPES[name]()):
        return te.Linear(64, 64).weight.detach()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_read_memory_that_is_not_there_is_refused_by_name(case, name):
    call, method = REFUSED[case]
    held = weight(name)
    before = held.dequantize()
    with pytest.raises(UnsupportedError, match=rf"{type(held).__name__}\.{method}: got a quantized tensor") as raised:
        call(held)
    assert "dequantize()" in raised.value.todo
    assert torch.equal(held.dequantize(), before)


@pytest.mark.parametrize("case", REFUSED_BY_TORCH)
def test_below_those_methods_torch_refuses(case):
    held = weight()
    views = [held, held.detach(), held.clone(), held.view(32, 128), torch.nn.Parameter(held)]
    for each in views:
        with pytest.raises((RuntimeError, TypeError, AttributeError)):
            REFUSED_BY_TORCH[case](each.detach())


@pytest.mark.parametrize("case", DISPATCHED)
def test_what_torch_dispatches_gives_the_values(case):
    held = weight()
    assert torch.equal(DISPATCHED[case](held) + 0, held.dequantize())


def test_a_storage_has_the_size_of_plain_values_and_no_bytes():
    held = weight().to(torch.bfloat16)
    assert held.untyped_storage().nbytes() == held.nbytes == 64 * 64 * 2
    assert held.untyped_storage().device.type == "meta"


@pytest.mark.parametrize("name", RECIPES)
def test_share_memory_moves_every_buffer_and_keeps_the_values(name):
    with te.quantized_model_init(recipe=RECIPES[name]()):
        model = torch.nn.Sequential(te.Linear(64, 64), te.LayerNormMLP(64, 64))
    x = torch.randn(32, 64)
    with torch.no_grad(), te.autocast(recipe=RECIPES[name]()):
        before = model(x)
    assert not model[0].weight.is_shared()
    assert model.share_memory() is model
    assert all(parameter.is_shared() for parameter in model.parameters())
    assert all(buffer.is_shared() for buffer in model[0].weight.quantized_storage.tensors() if buffer is not None)
    if name != "delayed":  # its scales move on
        with torch.no_grad(), te.autocast(recipe=RECIPES[name]()):
            assert torch.equal(model(x), before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="another process by fork")
def test_what_another_process_writes_to_shared_weights_is_seen_here():
    held = weight().share_memory_()
    child = os.fork()
    if child == 0:
        for buffer in held.quantized_storage.tensors():
            if buffer is not None:
                buffer.fill_(0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not held.dequantize().any()
