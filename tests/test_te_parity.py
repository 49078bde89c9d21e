"""Every argument of Transformer Engine is here, or refused with its reason; what is declared as refused is refused."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.refusals import REFUSED

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
page = import_module("parity_page")

SURFACE = page.surface()["callables"]
LAYER = (32, 64, 4)
X = torch.zeros(16, 32)
LOGITS = torch.zeros(4, 8)


def heads() -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(4, 2, 4, 8) for _ in range(3))


#: What each callable needs to be called with, besides the argument that is refused.
NEEDED = {
    **dict.fromkeys(("Linear", "LayerNormLinear", "ops.Linear", "ops.BasicLinear"), (32, 32)),
    **dict.fromkeys(("LayerNorm", "RMSNorm", "ops.LayerNorm", "ops.RMSNorm", "ops.Bias"), (32,)),
    "LayerNormMLP": (32, 64),
    "GroupedLinear": (2, 32, 32),
    "TransformerLayer": LAYER,
    "MultiheadAttention": (32, 4),
    "DotProductAttention": (4, 8),
    "DotProductAttention.forward": heads(),
    "LayerNormLinear.forward": (X,),
    "InferenceParams": (2, 16, 4, 8, torch.float32),
    "checkpoint": (torch.sin, X),
    "moe_permute": (X, torch.ones(16, 2, dtype=torch.int32), 32),
    "make_graphed_callables": (torch.nn.Linear(32, 32), (X,)),
    "newton_schulz": (torch.eye(4),),
    "parallel_cross_entropy": (torch.zeros(2, 2, 8), torch.zeros(2, 2, dtype=torch.int64)),
    "router.fused_topk_with_score_function": (LOGITS, 2, False, None, None, None, "softmax", None),
    "optimizers.FusedAdam": ([torch.nn.Parameter(X)],),
    "optimizers.FusedSGD": ([torch.nn.Parameter(X)], 0.1),
    "recipe.CustomRecipe": (te.IdentityQuantizer,),
    **dict.fromkeys(("MXFP8TensorStorage", "NVFP4TensorStorage"), (None,) * 6),
}
#: What makes an argument be looked at.
BESIDES = {("NVFP4Quantizer", "with_random_sign_mask"): {"with_rht": True}}
#: What methods are called on.
OWNERS = {
    "DotProductAttention": lambda: te.DotProductAttention(4, 8),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32),
    "optimizers.FusedAdam": lambda: te.optimizers.FusedAdam([torch.nn.Parameter(X)]),
}
#: Values of the right type that are refused, where the accepted one does not say one.
OTHERS = {
    "cp_comm_type": "all_gather",
    "nvfp4_4over6": "all",
    "fp8_format": recipe.Format.E4M3,
    "nvfp4_4over6_err_mode": "MSE",
}


def other(name: str, accepted: object) -> object:
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(accepted, bool):
        return not accepted
    if isinstance(accepted, int):
        return accepted + 1
    return "none" if isinstance(accepted, str) else object()


def entered(called: object) -> None:
    """A context manager refuses where it begins."""
    if hasattr(called, "__enter__"):
        called.__enter__()


def named(whole: str):
    """The callable, a method's on an object."""
    owner, _, method = whole.rpartition(".")
    return getattr(OWNERS[owner](), method) if owner in OWNERS else page.here(whole)


@pytest.mark.parametrize("name", SURFACE)
def test_every_argument_of_transformer_engine_is_here_or_refused_with_a_reason(name):
    """`rows` raises on one that is neither."""
    if page.here(name) is None:
        assert len(te._REFUSED_NAMES[name]) > 10
        return
    found = page.rows(name, "", SURFACE[name]["arguments"])
    assert {row.argument for row in found} >= {argument.lstrip("*") for argument in SURFACE[name]["arguments"]}
    assert all(row.words for row in found if row.kind != "supported")


@pytest.mark.parametrize("name", page.notes()["refused"])
def test_what_is_refused_whole_is_refused_whatever_it_is_called_with(name):
    with pytest.raises(NotImplementedError, match=name.rpartition(".")[2]):
        page.here(name)(None)


def test_an_argument_that_nobody_knows_is_an_error():
    with pytest.raises(LookupError, match=r"Linear: nobody_knows is neither"):
        page.rows("Linear", "", {"in_features": None, "nobody_knows": "False"})


def test_a_default_that_differs_is_told():
    assert page.rows("Linear", "", {"bias": "False"})[0].words == "`True` by default, there `False`"


def test_another_order_of_arguments_is_told():
    assert page.rows("Linear", "", {"out_features": None, "in_features": None})[-1].argument == "order of arguments"


@pytest.mark.parametrize(("whole", "name"), [(whole, name) for whole, names in REFUSED.items() for name in names])
def test_what_is_declared_as_refused_is_refused_by_name_with_its_reason(whole, name):
    accepted, reason = REFUSED[whole][name]
    function = named(whole)
    taken = inspect.signature(function).parameters
    given = {"enabled": True} if name == "enabled" else {name: other(name, accepted)}
    packed = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in taken.values())
    needed = NEEDED.get(whole, ())
    by_name = {} if packed else {key: value for key, value in zip(taken, needed, strict=False) if key != name}
    given |= by_name | BESIDES.get((whole, name), {})
    with pytest.raises((NotImplementedError, ValueError), match=name) as refused:
        entered(function(*(needed if packed else ()), **given))
    assert reason in str(refused.value)
