"""Recompute of parts: LayerNormMLP's ``checkpoint``, and ``checkpoint_core_attention``."""

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


#: How attention is computed, and what its call gets.
ATTENDED = {
    "torch": (False, {}),
    "written_out": (True, {}),
    "padding": (False, {"attn_mask_type": "padding"}),
    "bias": (False, {"core_attention_bias_type": "post_scale_bias"}),
    "thd": (False, {"qkv_format": "thd", "attn_mask_type": "padding_causal"}),
}


def attend(case: str, *, recomputed: bool, dropout: float, tracker: te.RNGStatesTracker) -> list[torch.Tensor]:
    written_out, given = ATTENDED[case]
    torch.manual_seed(0)
    module = te.DotProductAttention(
        4, 8, attention_dropout=dropout, softmax_type="vanilla", get_rng_state_tracker=lambda: tracker
    )
    module.always_written_out = written_out
    shape = (16, 4, 8) if case == "thd" else (8, 2, 4, 8)
    tensors = [torch.randn(shape).requires_grad_() for _ in range(3)]
    if case == "padding":
        given = given | {"attention_mask": torch.arange(8).expand(2, 1, 1, 8) >= 6}
    if case == "bias":
        tensors.append(torch.randn(1, 4, 8, 8).requires_grad_())
        given = given | {"core_attention_bias": tensors[3]}
    if case == "thd":
        given = given | {"cu_seqlens_q": torch.tensor([0, 7, 16])}
    y = module(*tensors[:3], checkpoint_core_attention=recomputed, **given)
    with tracker.fork():
        torch.rand(5)  # the stream goes on before the backward
    y.square().sum().backward()
    return [y, *(tensor.grad for tensor in tensors)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", ATTENDED)
def test_attention_computed_again_gives_the_same_bytes(case, dropout):
    found = []
    for recomputed in (False, True):
        tracker = te.RNGStatesTracker()
        tracker.add("model-parallel-rng", 3)
        found.append(attend(case, recomputed=recomputed, dropout=dropout, tracker=tracker))
    assert same(*found)


def test_attention_computed_again_keeps_queries_keys_and_values_alone():
    module = te.DotProductAttention(4, 8)
    module.always_written_out = True  # whose probabilities would be kept
    tensors = [torch.randn(64, 2, 4, 8, requires_grad=True) for _ in range(3)]
    kept = bytes_kept(module, lambda: module(*tensors, checkpoint_core_attention=True))
    assert kept == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", ["plain", "delayed"])
def test_a_layer_that_attends_again_in_the_backward_gives_the_same_bytes(name):
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        layer = te.TransformerLayer(SIZE, 2 * SIZE, 4, attention_dropout=0.2, hidden_dropout=0.1)
        x = torch.randn(8, 4, SIZE).requires_grad_()
        with autocast(name):
            y = layer(x, checkpoint_core_attention=recomputed)
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
    assert same(*found)
