"""quantized_model_init on the meta device: no memory there, and values once the module is elsewhere."""

from __future__ import annotations

import io

import pytest
import torch
from quantized_layers import EVERY, run

import te_hal.modules as te

ALL = pytest.mark.parametrize("name", EVERY)
LAYERS = {
    "Linear": lambda **k: te.Linear(32, 64, params_dtype=torch.bfloat16, **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(32, 64, params_dtype=torch.bfloat16, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16, **k),
    "GroupedLinear": lambda **k: te.GroupedLinear(2, 32, 64, params_dtype=torch.bfloat16, **k),
}


def made(layer: str, name: str, *, keep: bool = False, **arguments: object) -> torch.nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=EVERY[name](), preserve_high_precision_init_val=keep):
        return LAYERS[layer](**arguments)


def materialised(layer: str, name: str, **arguments: object) -> torch.nn.Module:
    module = made(layer, name, device="meta", **arguments).to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    return module


def codes(module: torch.nn.Module) -> list[torch.Tensor]:
    return [
        buffer
        for parameter in module.parameters()
        for buffer in (
            parameter.quantized_storage.tensors() if isinstance(parameter, te.QuantizedTensor) else (parameter,)
        )
        if buffer is not None
    ]


@pytest.mark.parametrize("layer", LAYERS)
@ALL
def test_a_module_on_the_meta_device_holds_no_memory_and_says_its_sizes(name, layer):
    module, there = made(layer, name, device="meta"), made(layer, name)
    assert all(buffer.is_meta for buffer in codes(module))
    assert te.memory_report(module).nbytes == 0
    assert [(p.shape, p.dtype) for p in module.parameters()] == [(p.shape, p.dtype) for p in there.parameters()]
    elsewhere = codes(module.to_empty(device="cpu"))
    assert [(b.shape, b.dtype) for b in elsewhere] == [(b.shape, b.dtype) for b in codes(there)]


@pytest.mark.parametrize("layer", LAYERS)
@ALL
def test_reset_parameters_elsewhere_gives_the_bytes_of_a_module_that_was_made_there(name, layer):
    module, there = materialised(layer, name), made(layer, name)
    assert [type(p) for p in module.parameters()] == [type(p) for p in there.parameters()]
    for key, value in module.named_parameters():
        assert torch.equal(value.dequantize(), there.get_parameter(key).dequantize()), key
        assert value.requires_grad


@ALL
def test_it_trains_as_a_module_that_was_made_there(name):
    results = [run(module, name) for module in (materialised("Linear", name), made("Linear", name))]
    assert all(map(torch.equal, *results))


@ALL
def test_a_checkpoint_fills_it(name):
    there, module = made("Linear", name), made("Linear", name, device="meta").to_empty(device="cpu")
    buffer = io.BytesIO()
    torch.save(there.state_dict(), buffer)
    buffer.seek(0)
    module.load_state_dict(torch.load(buffer, weights_only=False))
    x = torch.randn(32, 32).bfloat16()
    outputs = []
    for each in (there, module):
        with te.autocast(recipe=EVERY[name]()):
            outputs.append(each(x))
    assert torch.equal(*outputs)


def test_the_preserved_value_is_that_of_the_reset():
    module = made("Linear", "current", device="meta", keep=True)
    assert module.weight.get_high_precision_init_val() is None
    module = module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    kept = made("Linear", "current", keep=True).weight.get_high_precision_init_val()
    assert torch.equal(module.weight.get_high_precision_init_val(), kept)


def test_a_move_to_another_device_keeps_the_preserved_value():
    module = made("Linear", "current", keep=True)
    kept = module.weight.get_high_precision_init_val()
    module.to("meta")
    assert module.weight.get_high_precision_init_val() is kept


def test_a_reset_under_delayed_scaling_starts_with_scale_1_again():
    module = made("Linear", "delayed")
    for seed in range(3):
        run(module, "delayed", seed)
    assert module.fp8_meta["scaling_fwd"].scale[1] != 1
    torch.manual_seed(0)
    module.reset_parameters()
    assert torch.equal(module.weight.dequantize(), made("Linear", "delayed").weight.dequantize())
