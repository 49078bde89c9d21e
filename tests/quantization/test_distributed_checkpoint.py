"""torch.distributed.checkpoint of quantized tensors and of models that hold them, by one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization.hybrid_tensor import rebuild_hybrid_tensor
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

E4M3 = torch.float8_e4m3fn
QUANTIZERS = {
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3),
    "1x128": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "128x128": lambda: te.Float8BlockQuantizer(E4M3),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "mtfp8": lambda: te.MTFP8Quantizer(E4M3),
    "nvfp4": te.NVFP4Quantizer,
    "hybrid": lambda: te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=te.NVFP4Quantizer()
    ),
}
RECIPES = {
    "delayed": recipe.DelayedScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}


def save(state: dict[str, object], path: Path) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def load(state: dict[str, object], path: Path) -> None:
    with torch.serialization.safe_globals([rebuild_quantized_tensor, rebuild_hybrid_tensor]):
        dcp.load(state, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_tensor_comes_back_with_the_same_bytes(name, tmp_path):
    saved, other = (QUANTIZERS[name]()(torch.randn(64, 128).bfloat16()).detach() for _ in range(2))
    save({"x": saved}, tmp_path)
    load({"x": other}, tmp_path)
    assert (type(other), other.dtype, other.requires_grad) == (type(saved), saved.dtype, False)
    buffers = zip(saved.quantized_storage.tensors(), other.quantized_storage.tensors(), strict=True)
    for one, another in buffers:
        assert one is another is None or (torch.equal(one, another) and one.data_ptr() != another.data_ptr())


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_whose_weights_live_in_few_bits_goes_on_alike(name, tmp_path):
    def made(seed: int) -> te.Linear:
        torch.manual_seed(seed)
        with te.quantized_model_init(recipe=RECIPES[name]()):
            return te.Linear(64, 96, params_dtype=torch.bfloat16)

    def output(module: te.Linear) -> torch.Tensor:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
        with te.autocast(recipe=RECIPES[name]()):
            return module(x)

    one, other = made(0), made(1)
    output(one)
    save(one.state_dict(), tmp_path)
    state = other.state_dict()
    state["_extra_state"] = torch.zeros_like(one.state_dict()["_extra_state"])  # torch wants its size beforehand
    load(state, tmp_path)
    other.load_state_dict(state)
    assert torch.equal(output(one), output(other))


def test_staging_that_goes_by_addresses_is_refused_by_name():
    stager = pytest.importorskip("torch.distributed.checkpoint._state_dict_stager")
    q = te.MXFP8Quantizer(E4M3)(torch.randn(32, 64))
    with pytest.raises(UnsupportedError, match=r"MXFP8Tensor\.data_ptr"):
        stager.StateDictStager(pin_memory=False, share_memory=False).stage({"x": q.detach()})
