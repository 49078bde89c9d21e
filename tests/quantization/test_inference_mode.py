"""Quantized tensors and weights inside torch.inference_mode: what they are outside of it.

torch hands a tensor class whole functions there (``to``, ``reshape``, ``linear``) that it takes apart elsewhere, and
refuses a view that is an inference tensor of one that is none.
"""

from __future__ import annotations

import pytest
import torch
from float8_tensors import is_quantized, plain, quantizer
from quantized_layers import EVERY, quantized, run

import te_hal.modules as te

STAYS_QUANTIZED = {
    "detach": lambda q: q.detach(),
    "data": lambda q: q.data,
    "clone": lambda q: q.clone(),
    "view": lambda q: q.view(2, 16, 32),
    "reshape": lambda q: q.reshape(2, 16, 32),
    "flatten": lambda q: q.flatten(0, 0),
    "split": lambda q: q.split(16)[1],
    "chunk": lambda q: q.chunk(2)[1],
    "to": lambda q: q.to(torch.bfloat16),
    "type_as": lambda q: q.type_as(torch.ones(1, dtype=torch.bfloat16)),
    "contiguous": lambda q: q.contiguous(),
}
BECOMES_PLAIN = {
    "t": lambda q: q.t(),
    "T": lambda q: q.T,
    "index": lambda q: q[3],
    "narrow": lambda q: q.narrow(0, 1, 5),
    "unbind": lambda q: q.unbind(0)[2],
    "expand": lambda q: q[None].expand(2, 32, 32),
    "linear": lambda q: torch.nn.functional.linear(torch.eye(32), q.float()),
    "sum": lambda q: q + 1,
}
LAYERS = {"linear": te.Linear, "norm_linear": te.LayerNormLinear}


@pytest.mark.parametrize("made_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*STAYS_QUANTIZED, *BECOMES_PLAIN])
def test_an_operation_gives_what_it_gives_a_plain_tensor_and_keeps_what_the_format_defines(name, made_in):
    operation = {**STAYS_QUANTIZED, **BECOMES_PLAIN}[name]
    with made_in():
        q = quantizer()(torch.randn(32, 32))
    expected = operation(plain(q).clone())
    with torch.inference_mode():
        result = operation(q)
        assert is_quantized(result) == (name in STAYS_QUANTIZED)
        values = plain(result) if is_quantized(result) else result
        assert (values.shape, values.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(values, expected)


def test_writing_reaches_the_tensor_itself():
    q = quantizer()(torch.randn(32, 32))
    with torch.inference_mode():
        q.copy_(torch.full((32, 32), 2.0))
        q.mul_(2.0)
    assert torch.equal(plain(q), torch.full((32, 32), 4.0))


@pytest.mark.parametrize("name", EVERY)
def test_another_dtype_of_a_module_leaves_its_weights_quantized(name):
    layer = quantized(name)
    with torch.inference_mode():
        layer.to(torch.float16)
    assert isinstance(layer.weight, te.QuantizedTensor)
    assert layer.weight.dtype == torch.float16


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", EVERY)
def test_a_layer_with_quantized_weights_gives_the_bytes_of_no_grad_and_trains_afterwards(name, layer):
    infers, untouched = quantized(name, LAYERS[layer]), quantized(name, LAYERS[layer])
    x = torch.randn(32, 32).to(torch.bfloat16)
    outputs = {}
    for context, module in ((torch.inference_mode, infers), (torch.no_grad, untouched)):
        with context(), te.autocast(recipe=EVERY[name]()):
            outputs[context] = [module(x), module(x, is_first_microbatch=True), module(x, is_first_microbatch=False)]
            module.load_state_dict(module.state_dict())
    for got, expected in zip(outputs[torch.inference_mode], outputs[torch.no_grad], strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(run(infers, name), run(untouched, name), strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(infers.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(got.grad, expected.grad)
