"""The kit's own oracles against ml_dtypes, brute force and plain torch: nobody else checks the checker."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_oracle import assert_holds
from fp8_codes import codes_of, values_of
from hard_values import draw

from te_hal.schema.formats import E4M3, E5M2, FLOATS, ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage, StorageKind
from te_hal.testing.case import Case
from te_hal.testing.oracles import activations, cast, codes, norms, products, softmax

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=["E4M3", "E5M2"])


@FORMATS
def test_every_code_has_the_value_that_ml_dtypes_gives_it(format):
    every = torch.arange(256).to(torch.uint8)
    assert np.array_equal(codes.values(format).astype(np.float32), values_of(every, format), equal_nan=True)


@FORMATS
@pytest.mark.parametrize("pattern", ["wide", "any bits"])
def test_a_cast_is_the_one_that_ml_dtypes_rounds(format, pattern):
    values = draw((1 << 16,), torch.float32, pattern).numpy()
    with np.errstate(all="ignore"):
        assert np.array_equal(codes.encode(values, format), codes_of(values, format))


@FORMATS
def test_a_tie_goes_to_the_even_code(format):
    known = codes.values(format)[: 0x7E if format is E4M3 else 0x7B]
    middles = ((known[1:] + known[:-1]) / 2).astype(np.float32)
    assert np.array_equal(codes.encode(middles, format), codes_of(middles, format))
    assert (codes.encode(middles, format) % 2 == 0).all()


@pytest.mark.parametrize("mode", [ScalingMode.BLOCK_1X128, ScalingMode.BLOCK_128X128, ScalingMode.MXFP8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_cast_by_blocks_is_the_one_by_brute_force(mode, dtype):
    x = draw((130, 264), dtype, "any bits")
    kind = StorageKind.of(E4M3, mode, rowwise=True, columnwise=True, order=ColumnwiseOrder.SAME)
    storage = QuantizedStorage.empty(kind, (130, 264), dtype, "cpu")
    for rowwise in (True, False):
        made = cast.quantized(cast.as_rows(x), dtype, E4M3, mode, rowwise=rowwise)
        held = storage.rowwise_data if rowwise else storage.columnwise_data
        held.copy_(torch.from_numpy(made.codes))
        _, factors = cast.stored(storage, rowwise=rowwise)
        inverse = storage.rowwise_scale_inv if rowwise else storage.columnwise_scale_inv
        cast.scale_grid(inverse, mode, (130, 264), rowwise=rowwise).copy_(torch.from_numpy(made.factors))
        assert factors.shape == made.factors.shape
    assert_holds(storage, x)


def test_a_norm_is_the_one_that_torch_computes_in_float64():
    given = Case.of("layernorm_fwd:everyday").arguments()
    x, weight, bias = (given[name].double() for name in ("input", "weight", "bias"))
    due = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, given["epsilon"])
    assert torch.allclose(norms.forward(given)["output"].value, due, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["layernorm_bwd", "rmsnorm_bwd"])
def test_a_gradient_of_a_norm_is_the_one_that_autograd_finds(op):
    given = Case.of(f"{op}:grad_output=fp32,input=fp32,weight=fp32").arguments()
    names = [name for name in ("input", "weight", "bias") if name in given or op == "layernorm_bwd"]
    variables = {n: given[n].double() if n in given else torch.zeros_like(given["weight"]).double() for n in names}
    for variable in variables.values():
        variable.requires_grad_()
    made = norms.normalised({**variables, "epsilon": 1e-5, "zero_centered_gamma": False})
    due = torch.autograd.grad(made["output"], list(variables.values()), given["grad_output"].double())
    # The statistics were rounded to fp32.
    saved = {n: made[n].detach() for n in ("mean", "rstd") if n in given}
    found = norms.backward({**given, **saved})
    for name, gradient in zip(names, due, strict=True):
        assert torch.allclose(found[f"grad_{name}"].value, gradient, rtol=1e-9, atol=1e-9)


def test_a_masked_softmax_is_the_one_by_brute_force():
    given = Case.of("softmax_fwd:shape=13x37,input=fp32,mask=bool,causal=bottom_right,window=5:-1").arguments()
    found = softmax.forward(given)["output"].value
    for query in range(13):
        diagonal = query + 37 - 13
        seen = [k for k in range(37) if diagonal - 5 <= k <= diagonal and not given["mask"][query, k]]
        weights = [float(given["input"][query, k].double().exp()) for k in seen]
        due = torch.zeros(37, dtype=torch.float64)
        for key, weight in zip(seen, weights, strict=True):
            due[key] = weight / sum(weights)
        assert torch.allclose(found[query], due, rtol=1e-12)


@pytest.mark.parametrize("layout", ["fprop", "dgrad", "wgrad"])
def test_a_product_is_the_sum_of_products(layout):
    given = Case.of(f"gemm:shape=13x37x29,layout={layout}").arguments()
    a, b = given["a"].double().numpy(), given["b"].double().numpy()
    formula = {"fprop": "mk,nk->mn", "dgrad": "mn,nk->mk", "wgrad": "mn,mk->nk"}[layout]
    assert np.allclose(products.gemm(given)["output"].value.numpy(), np.einsum(formula, a, b), rtol=1e-12)


def test_the_slope_of_an_activation_is_nan_at_nan_and_beside_it_not():
    x = torch.tensor([[float("nan"), -1.0, 2.0]])
    given = {"input": x, "grad_output": torch.ones_like(x), "activation": "relu"}
    found = activations.backward(given)["grad_input"].value
    assert found.isnan().tolist() == [[True, False, False]]
    assert found[0, 1:].tolist() == [0.0, 1.0]
