"""torch.distributed.checkpoint of quantized tensors and of models that hold them, by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories
from te_hal.quantization.hybrid_tensor import rebuild_hybrid_tensor
from te_hal.quantization.identity_tensor import rebuild_identity_tensor
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

E4M3 = torch.float8_e4m3fn
QUANTIZERS = {
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3),
    "1x128": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "128x128": lambda: te.Float8BlockQuantizer(E4M3),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "mtfp8": lambda: te.MTFP8Quantizer(E4M3),
    "nvfp4": te.NVFP4Quantizer,
    "identity": te.IdentityQuantizer,
    "hybrid": lambda: te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=te.NVFP4Quantizer()
    ),
}
RECIPES = {
    "delayed": recipe.DelayedScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "two parts": lambda: recipe.CustomRecipe(qfactory=quantizer_factories.mxfp8_fwd_nvfp4_bwd_factory),
    "requests": lambda: recipe.CustomRecipe(qfactory=quantizer_factories.delayed_scaling_factory),
    "high precision": lambda: recipe.CustomRecipe(qfactory=quantizer_factories.high_precision_factory),
}


def save(state: dict[str, object], path: Path) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def load(state: dict[str, object], path: Path) -> None:
    with torch.serialization.safe_globals([rebuild_quantized_tensor, rebuild_hybrid_tensor, rebuild_identity_tensor]):
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


def documented() -> object:
    """``load_distributed`` of docs/checkpoints.md."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    source = page.split("### Through torch.distributed.checkpoint")[1].split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(compile(source, "checkpoints.md", "exec"), names)  # noqa: S102 - this repository's own page
    return names["load_distributed"]


def stack(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(te.LayerNormLinear(32, 64), torch.nn.ReLU(), te.Linear(64, 32))


def train(model: torch.nn.Module, chosen: recipe.Recipe, number: int) -> list[torch.Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(number)) * (number + 1)
    model.zero_grad()
    with te.autocast(recipe=chosen):
        y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(
    "chosen", [recipe.DelayedScaling(amax_history_len=4), recipe.Float8CurrentScaling()], ids=["delayed", "current"]
)
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran before"])
def test_the_documented_way_loads_into_a_model_that_goes_on_bit_for_bit(chosen, ran, tmp_path):
    one, other = stack(0), stack(1)
    for number in range(3):
        train(one, chosen, number)
    save(one.state_dict(), tmp_path)
    if ran:
        train(other, recipe.DelayedScaling(amax_history_len=7), 5)
    documented()(other, tmp_path)
    for number in range(3, 5):
        results = train(one, chosen, number), train(other, chosen, number)
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_fresh_model_has_no_room_for_the_state_of_delayed_scaling(tmp_path):
    one = stack(0)
    train(one, recipe.DelayedScaling(), 0)
    save(one.state_dict(), tmp_path)
    with pytest.raises(CheckpointException, match=r"Size mismatch between saved .*_extra_state"):
        load(stack(1).state_dict(), tmp_path)


def test_the_documented_way_takes_a_model_of_torch_without_state(tmp_path):
    plain = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))
    save(plain.state_dict(), tmp_path)
    ours = torch.nn.Sequential(te.LayerNorm(32), te.Linear(32, 32))
    documented()(ours, tmp_path)
    assert torch.equal(ours[1].weight, plain[1].weight)
    assert torch.equal(ours[1].bias, plain[1].bias)


def test_staging_that_goes_by_addresses_is_refused_by_name():
    stager = pytest.importorskip("torch.distributed.checkpoint._state_dict_stager")
    q = te.MXFP8Quantizer(E4M3)(torch.randn(32, 64))
    with pytest.raises(UnsupportedError, match=r"MXFP8Tensor\.data_ptr"):
        stager.StateDictStager(pin_memory=False, share_memory=False).stage({"x": q.detach()})
