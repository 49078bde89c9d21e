"""Recompute that a module does for a part of itself: LayerNormMLP's ``checkpoint``."""

from __future__ import annotations

import pytest
import torch
from counting_backend import Counting
from recomputed_stack import RECIPES, WAYS, same
from transformer_bytes import bytes_kept

import te_hal
import te_hal.modules as te

SIZE = 32
NAMES = ["plain", *(name for name in RECIPES if name not in ("hybrid", "override"))]


def mlp(*, checkpoint: bool, dtype: torch.dtype = torch.bfloat16, **given) -> te.LayerNormMLP:
    torch.manual_seed(0)
    return te.LayerNormMLP(SIZE, 2 * SIZE, checkpoint=checkpoint, params_dtype=dtype, **given)


def data(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(SIZE, SIZE, generator=generator) * (1 + number)).to(torch.bfloat16).requires_grad_()


def autocast(name: str):
    return te.autocast(enabled=name != "plain", recipe=None if name == "plain" else RECIPES[name]())


def train(module: te.LayerNormMLP, name: str, way: str | None = None, flags=(None, None)) -> list[torch.Tensor]:
    found = []
    for number in range(2):
        graphs = []
        for flag in flags:
            x = data(number)

            def run(h: torch.Tensor, flag=flag) -> torch.Tensor:
                results = module(h, is_first_microbatch=flag)
                return sum(results) if isinstance(results, tuple) else results

            with autocast(name):
                graphs.append((x, run(x) if way is None else WAYS[way](run, x)))
        for x, y in reversed(graphs):
            y.float().square().mean().backward()
            found += [y.detach(), x.grad]
    return [*found, *(p.grad for p in module.parameters()), module.get_extra_state()]


@pytest.mark.parametrize("flags", [(None, None), (True, False)], ids=["", "microbatches"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_bit_for_bit_that_without(name, flags):
    assert same(*(train(mlp(checkpoint=checkpoint), name, flags=flags) for checkpoint in (False, True)))


@pytest.mark.parametrize(
    "given",
    [{"return_layernorm_output": True, "return_bias": True}, {"activation": "swiglu", "normalization": "RMSNorm"}],
    ids=["everything_returned", "swiglu"],
)
@pytest.mark.parametrize("name", ["plain", "delayed"])
def test_whatever_the_module_returns_and_computes(name, given):
    assert same(*(train(mlp(checkpoint=checkpoint, **given), name) for checkpoint in (False, True)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["plain", "delayed"])
def test_inside_a_checkpointed_function_too(name, way):
    assert same(train(mlp(checkpoint=False), name), train(mlp(checkpoint=True), name, way))


@pytest.mark.parametrize("name", ["plain", "delayed", "mxfp8"])
def test_nothing_but_the_input_is_kept(name):
    module, x = mlp(checkpoint=True), data(0)

    def forward() -> torch.Tensor:
        with autocast(name):
            return module(x)

    assert bytes_kept(module, forward) == x.nbytes


def test_the_second_run_leaves_out_the_product_whose_result_nobody_reads():
    counting, module = Counting(), mlp(checkpoint=True)
    with te_hal.use_backend("counting"), autocast("current"):
        y = module(data(0))
    assert counting.count("gemm", "fprop") == 2
    counting.launches.clear()
    y.float().sum().backward()
    assert counting.count("gemm", "fprop") == 1


def test_without_gradients_nothing_is_recomputed():
    module = mlp(checkpoint=True)
    with torch.no_grad(), autocast("delayed"):
        assert torch.equal(module(data(0)), mlp(checkpoint=False)(data(0)))
