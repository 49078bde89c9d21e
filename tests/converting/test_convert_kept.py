"""te_hal.convert loses nothing of what a user has made of a layer, and its layers refuse what torch's refuse."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import te_hal
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(32, 4)


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, norm_first=True)


def replaced(module: nn.Module, name: str, part: nn.Module) -> nn.Module:
    setattr(module, name, part)
    return module


def hooked(module: nn.Module, part: str, register: str = "register_forward_hook") -> nn.Module:
    getattr(module.get_submodule(part), register)(lambda *_: None)
    return module


def grown(module: nn.Module, what: object) -> nn.Module:
    module.more = what
    return module


def cast(module: nn.Module, part: str, dtype: torch.dtype) -> nn.Module:
    module.get_submodule(part).to(dtype)
    return module


#: A layer, and the reason why it stays.
CHANGED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook of saving": (lambda: hooked(nn.Linear(32, 32), "", "register_state_dict_pre_hook"), "it has hooks"),
    "hook of loading": (
        lambda: hooked(nn.Linear(32, 32), "", "register_load_state_dict_post_hook"),
        "it has hooks",
    ),
    "parameter": (lambda: grown(nn.Linear(32, 32), nn.Parameter(torch.zeros(1))), "more was added"),
    "part": (lambda: grown(nn.LayerNorm(32), nn.Linear(32, 32)), "more was added"),
    "attention's output hooked": (lambda: hooked(attention(), "out_proj"), "of its out_proj: it has hooks"),
    "attention's output of a class": (
        lambda: replaced(attention(), "out_proj", Doubled(32, 32)),
        "of its out_proj: Doubled may compute",
    ),
    "attention's output in fp64": (lambda: cast(attention(), "out_proj", torch.float64), "several dtypes"),
    "layer's product hooked": (lambda: hooked(layer(), "linear1"), "of its linear1: it has hooks"),
    "layer's dropout hooked": (lambda: hooked(layer(), "dropout1"), "of its dropout1: it has hooks"),
    "layer's product of a class": (
        lambda: replaced(layer(), "linear1", Doubled(32, 64)),
        "of its linear1: Doubled may compute",
    ),
    "layer's attention with a key": (
        lambda: replaced(layer(), "self_attn", nn.MultiheadAttention(32, 4, add_bias_kv=True)),
        "adds a key of its own",
    ),
    "layer in fp64": (lambda: layer().double(), "its parameters are torch.float64"),
    "layer's product in bf16": (lambda: cast(layer(), "linear2", torch.bfloat16), "several dtypes"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_layer_of_which_something_would_be_lost_stays(case: str) -> None:
    make, reason = CHANGED[case]
    model = nn.Sequential(make())
    kept = model[0]
    report = te_hal.convert(model)
    assert model[0] is kept
    assert report.left[0].name == "0"
    assert reason in report.left[0].reason


def test_parts_of_a_layer_that_stays_are_called_with_their_hooks() -> None:
    calls: list[int] = []
    model = nn.Sequential(layer())
    model[0].linear1.register_forward_hook(lambda *_: calls.append(1))
    te_hal.convert(model)
    model(torch.randn(6, 2, 32))
    assert calls == [1]


def converted(make: Callable[[], nn.Module]) -> Any:
    model = nn.Sequential(make())
    assert te_hal.convert(model).converted
    return model[0]


X, Y = torch.randn(6, 2, 32), torch.randn(3, 2, 32)


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"]
)
def test_attention_that_has_run_can_be_copied_and_the_copy_has_weights_of_its_own(way: Any) -> None:
    module = converted(attention)
    expected = module(X, Y, Y)[0]
    other = way(module)
    assert torch.equal(other(X, Y, Y)[0], expected)
    with torch.no_grad():
        other.in_proj_weight.zero_()
        other.in_proj_bias.fill_(1.0)
    assert torch.equal(module(X, Y, Y)[0], expected)
    assert not torch.equal(other(X, Y, Y)[0], expected)


def test_weights_that_are_replaced_or_cast_are_read_from_then_on() -> None:
    module = converted(attention)
    module(X, Y, Y)
    module.in_proj_weight = nn.Parameter(torch.zeros(96, 32))
    module.in_proj_bias = nn.Parameter(torch.zeros(96))
    assert torch.equal(module(X, Y, Y)[0], module.out_proj.bias.expand(6, 2, 32))
    assert module.to(torch.bfloat16)(X.bfloat16(), Y.bfloat16(), Y.bfloat16())[0].dtype == torch.bfloat16


def test_attention_is_freed_with_its_last_reference() -> None:
    module = converted(attention)
    module(X, Y, Y)
    gc.disable()
    try:
        gone = weakref.ref(module.in_proj_weight)
        del module
        assert gone() is None
    finally:
        gc.enable()


def hides(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


#: Of 6 queries, 3 keys, a batch of 2 and 4 heads.
ATTENTION = {
    "mask of keys and queries": ({"attn_mask": hides(3, 6)}, r"attn_mask: got shape \(3, 6\).*\(6, 3\) or \(8, 6, 3\)"),
    "masks of keys and queries": ({"attn_mask": hides(8, 3, 6)}, r"attn_mask: got shape \(8, 3, 6\)"),
    "masks of another batch": ({"attn_mask": hides(4, 6, 3)}, r"attn_mask: got shape \(4, 6, 3\)"),
    "mask of ints": ({"attn_mask": hides(6, 3, dtype=torch.uint8)}, "attn_mask: got .*torch.uint8"),
    "padding the other way": ({"key_padding_mask": hides(3, 2)}, r"key_padding_mask: got shape \(3, 2\).*\(2, 3\)"),
    "padding of queries": ({"key_padding_mask": hides(2, 6)}, r"key_padding_mask: got shape \(2, 6\)"),
    "padding of one": ({"key_padding_mask": hides(3)}, r"key_padding_mask: got shape \(3,\)"),
    "batch": ({"key": Y[:, :1], "value": Y[:, :1]}, r"key \(3, 1, 32\).*one N"),
    "fewer values": ({"value": Y[:2]}, r"value \(2, 2, 32\).*a value for each key"),
    "rank": ({"key": Y[:, 0], "value": Y[:, 0]}, r"key \(3, 32\)"),
    "rank of all": ({"query": X[None], "key": Y[None], "value": Y[None]}, r"query \(1, 6, 2, 32\)"),
    "hint": ({"is_causal": True}, "is_causal: got True without attn_mask"),
}


@pytest.mark.parametrize("weights", [False, True], ids=["result", "weights too"])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_refuses_what_does_not_fit_and_so_does_torchs(case: str, weights: bool) -> None:
    given, message = ATTENTION[case]
    arguments = {"query": X, "key": Y, "value": Y, "need_weights": weights, **given}
    with pytest.raises((RuntimeError, AssertionError)):
        attention()(**arguments)
    with pytest.raises(ArgumentError, match=f"MultiheadAttention.*{message}"):
        converted(attention)(**arguments)


LAYER = {
    "mask": ({"src_mask": hides(4, 9)}, r"src_mask: got shape \(4, 9\) .*\(6, 6\) or \(8, 6, 6\)"),
    "padding": ({"src_key_padding_mask": hides(6, 2)}, r"src_key_padding_mask: got shape \(6, 2\) .*\(2, 6\)"),
    "hint": ({"is_causal": True}, "is_causal: got True without src_mask"),
}


@pytest.mark.parametrize("case", LAYER)
def test_an_encoder_layer_refuses_what_does_not_fit_and_so_does_torchs(case: str) -> None:
    given, message = LAYER[case]
    with pytest.raises((RuntimeError, AssertionError)):
        layer()(X, **given)
    with pytest.raises(ArgumentError, match=f"EncoderLayer: {message}"):
        converted(layer)(X, **given)
