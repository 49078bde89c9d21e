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
    "Sequential": (lambda: te.ops.Sequential(te.ops.LayerNorm(16), te.ops.Linear(16, 16)), ROWS, lambda _: ()),
    "a converted nn.MultiheadAttention": (
        lambda: converted(nn.MultiheadAttention(16, 2)),
        (4, 2, 16),
        lambda x: (x, x + 1.0),
    ),
    "a converted nn.TransformerEncoderLayer": (encoder_layer, (4, 2, 16), lambda _: ()),
}

ANGLES = te.RotaryPositionEmbedding(8)

#: Compositions of torch's operations, which a compiler may take apart.
IN_ONE_GRAPH: dict[str, Callable[[torch.Tensor], Any]] = {
    "RotaryPositionEmbedding": lambda x: ANGLES(4) + x.sum(),
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
