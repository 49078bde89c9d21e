"""torch.compile around every module: one graph before it and one behind it, and the same bytes; or one graph in all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import te_hal
import te_hal.modules as te
from te_hal.modules.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's, of its own doings

ROWS = (32, 16)
HEADS = (4, 2, 2, 8)
MASK = torch.ones(32, 2, dtype=torch.bool)
PROBS, CHUNKS = torch.full((32, 2), 0.5), torch.tensor([18, 13, 1])
ORDER = torch.tensor([2, 0, 1])


def converted(layer: nn.Module) -> nn.Module:
    model = nn.Sequential(layer)
    te_hal.convert(model)
    return model[0]


def encoder_layer() -> nn.Module:
    return converted(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, norm_first=True))


#: What is called with a tensor of this shape and the rest. A compiled function leaves it as it is.
AS_THEY_STAND: dict[str, tuple[Callable[[], Any], tuple[int, ...], Callable[[torch.Tensor], tuple[Any, ...]]]] = {
    "Linear": (lambda: te.Linear(16, 16), ROWS, lambda _: ()),
    "LayerNorm": (lambda: te.LayerNorm(16), ROWS, lambda _: ()),
    "RMSNorm": (lambda: te.RMSNorm(16), ROWS, lambda _: ()),
    "LayerNormLinear": (lambda: te.LayerNormLinear(16, 16), ROWS, lambda _: ()),
    "LayerNormMLP": (lambda: te.LayerNormMLP(16, 32), ROWS, lambda _: ()),
    "GroupedLinear": (lambda: te.GroupedLinear(2, 16, 16), ROWS, lambda _: ([16, 16],)),
    "DotProductAttention": (lambda: te.DotProductAttention(2, 8), HEADS, lambda x: (x, x)),
    "MultiheadAttention": (lambda: te.MultiheadAttention(16, 2, attention_dropout=0.0), (4, 2, 16), lambda _: ()),
    "TransformerLayer": (
        lambda: te.TransformerLayer(16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0),
        (4, 2, 16),
        lambda _: (),
    ),
    "apply_rotary_pos_emb": (
        lambda: te.apply_rotary_pos_emb,
        HEADS,
        lambda _: (te.RotaryPositionEmbedding(8)(4),),
    ),
    "moe_permute": (lambda: te.moe_permute, ROWS, lambda _: (MASK,)),
    "moe_unpermute": (lambda: te.moe_unpermute, (64, 16), lambda _: (te.moe_permute(torch.zeros(ROWS), MASK)[1],)),
    "Fp8Padding": (lambda: te.Fp8Padding(2), ROWS, lambda _: ([13, 19],)),
    "Fp8Unpadding": (lambda: te.Fp8Unpadding(2), ROWS, lambda _: ([13, 9],)),
    "parallel_cross_entropy": (
        lambda: te.parallel_cross_entropy,
        ROWS,
        lambda _: (MASK[:, 0].long(),),
    ),
    "moe_permute_with_probs": (lambda: te.moe_permute_with_probs, ROWS, lambda _: (PROBS, MASK)),
    "moe_permute_and_pad_with_probs": (
        lambda: te.moe_permute_and_pad_with_probs,
        ROWS,
        lambda _: (PROBS, MASK, MASK.sum(0), 40),
    ),
    "moe_sort_chunks_by_index": (lambda: te.moe_sort_chunks_by_index, ROWS, lambda _: (CHUNKS, ORDER)),
    "moe_sort_chunks_by_index_with_probs": (
        lambda: te.moe_sort_chunks_by_index_with_probs,
        ROWS,
        lambda _: (PROBS[:, 0], CHUNKS, ORDER),
    ),
    "a decoder": (
        lambda: te.TransformerLayer(16, 32, 2, layer_type="decoder", hidden_dropout=0.0, attention_dropout=0.0),
        (4, 2, 16),
        lambda _: (None, None, None, None, torch.ones(3, 2, 16)),
    ),
    "Sequential": (lambda: te.ops.Sequential(te.ops.LayerNorm(16), te.ops.Linear(16, 16)), ROWS, lambda _: ()),
    "ops.Linear": (lambda: te.ops.Linear(16, 16), ROWS, lambda _: ()),
    "ops.BasicLinear": (lambda: te.ops.BasicLinear(16, 16), ROWS, lambda _: ()),
    "ops.GroupedLinear": (lambda: te.ops.GroupedLinear(2, 16, 16), ROWS, lambda _: ([16, 16],)),
    "ops.LayerNorm": (lambda: te.ops.LayerNorm(16), ROWS, lambda _: ()),
    "ops.RMSNorm": (lambda: te.ops.RMSNorm(16), ROWS, lambda _: ()),
    "ops.GELU": (te.ops.GELU, ROWS, lambda _: ()),
    "ops.SwiGLU": (te.ops.SwiGLU, ROWS, lambda _: ()),
    "ops.ScaledSwiGLU": (te.ops.ScaledSwiGLU, ROWS, lambda _: (PROBS[:, 0],)),
    "ops.Quantize": (te.ops.Quantize, ROWS, lambda _: ()),
    "ops.Bias": (lambda: te.ops.Bias(16), ROWS, lambda _: ()),
    "a converted nn.MultiheadAttention": (
        lambda: converted(nn.MultiheadAttention(16, 2)),
        (4, 2, 16),
        lambda x: (x, x + 1.0),
    ),
    "a converted nn.TransformerEncoderLayer": (encoder_layer, (4, 2, 16), lambda _: ()),
}

ANGLES, ADDS = te.RotaryPositionEmbedding(8), te.ops.AddExtraInput()

#: Compositions of torch's operations, which a compiler may take apart.
IN_ONE_GRAPH: dict[str, Callable[[torch.Tensor], Any]] = {
    "RotaryPositionEmbedding": lambda x: ANGLES(4) + x.sum(),
    "ops.L2Normalization": te.ops.L2Normalization(),
    "ops.Identity": te.ops.Identity(),
    "ops.Reshape": te.ops.Reshape((-1, 8)),
    "ops.Dropout": te.ops.Dropout(0.0),
    "ops.ConstantScale": te.ops.ConstantScale(2.0),
    "ops.AddExtraInput": lambda x: ADDS(x, x),
    "ops.MakeExtraOutput": te.ops.MakeExtraOutput(),
    "fused_topk": lambda x: fused_topk_with_score_function(x, 2, False, None, None, None, "softmax", None),
    "fused_compute_score": lambda x: fused_compute_score_for_moe_aux_loss(x, 2, "sigmoid"),
    "fused_moe_aux_loss": lambda x: fused_moe_aux_loss(x, torch.ones(16), 32, 16, 2, 0.1),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def flat(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [each for each in found if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("name", AS_THEY_STAND)
def test_a_module_breaks_the_graph_once_since_it_runs_as_it_stands(name: str) -> None:
    make, shape, rest = AS_THEY_STAND[name]
    module = make()
    x = torch.randn(shape)
    given = rest(x)

    def around(x: torch.Tensor) -> list[torch.Tensor]:
        return [each * 2.0 for each in flat(module(x + 1.0, *given))]

    expected = around(x)
    told = torch._dynamo.explain(around)(x)
    assert told.graph_break_count == 1
    assert "torch.compiler.disable" in told.break_reasons[0].reason
    assert all(map(torch.equal, torch.compile(around, backend="eager")(x), expected))


@pytest.mark.parametrize("name", IN_ONE_GRAPH)
def test_what_torch_computes_anyway_is_one_graph(name: str) -> None:
    function, x = IN_ONE_GRAPH[name], torch.rand(ROWS)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert all(map(torch.equal, flat(compiled(x)), flat(function(x))))


#: Ops that are another under a name of their own: the same forward.
ALIKE = {
    *("GEGLU", "GLU", "QGEGLU", "QGELU", "ReGLU", "ReLU", "SReGLU", "SReLU", "SiLU", "SiTUGLU", "ClampedSwiGLU"),
    *("ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU"),
}
#: Refused everywhere but in a group of one process, where they do nothing; and what is no op to run by itself.
WITHOUT_A_GRAPH = {"AllGather", "AllReduce", "ReduceScatter", "BasicOperation", "FusedOperation", "FusibleOperation"}


def test_every_module_and_op_is_among_these() -> None:
    def modules(where: Any, names: list[str]) -> set[str]:
        return {
            name for name in names if isinstance(kind := getattr(where, name), type) and issubclass(kind, nn.Module)
        }

    covered = {name.removeprefix("ops.") for name in (*AS_THEY_STAND, *IN_ONE_GRAPH)}
    assert modules(te, te.__all__) <= covered
    assert modules(te.ops, te.ops.__all__) - ALIKE - WITHOUT_A_GRAPH <= covered
    assert {name for name in te.__all__ if name.startswith("moe_")} <= covered
    for name in ALIKE:
        forward = getattr(te.ops, name).forward
        assert forward in {getattr(te.ops, known).forward for known in ("GELU", "SwiGLU", "ScaledSwiGLU")}, name
