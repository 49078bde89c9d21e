"""Arguments of the modules made of several layers: Transformer Engine's, each built or refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from layer_signatures import LAYERNORM_LINEAR, LAYERNORM_MLP, TRANSFORMER, Described

import te_hal.modules as te

DESCRIBED = {"LayerNormLinear": LAYERNORM_LINEAR, "LayerNormMLP": LAYERNORM_MLP, "TransformerLayer": TRANSFORMER}
MODULES = pytest.mark.parametrize("name", DESCRIBED)


def made(described: Described, **arguments: object) -> torch.nn.Module:
    names = list(described.arguments)[: len(described.sizes)]
    return described.kind(**{**dict(zip(names, described.sizes, strict=True)), **arguments})


def defaults(function: object) -> dict[str, object]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name != "self"}


@MODULES
def test_arguments_their_order_and_defaults_are_those_of_transformer_engine(name):
    described = DESCRIBED[name]
    assert list(defaults(described.kind).items()) == list(described.arguments.items())
    assert list(defaults(described.kind.forward).items()) == list(described.forward.items())


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, found in DESCRIBED.items() for argument in found.later]
)
def test_an_argument_of_a_later_feature_is_refused_by_name(name, argument):
    described = DESCRIBED[name]
    with pytest.raises(NotImplementedError, match=rf"{name}: {argument}: got .*leave it out: "):
        made(described, **{argument: described.later[argument]})


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, found in DESCRIBED.items() for argument in found.wrong]
)
def test_a_wrong_value_is_refused_at_construction_naming_the_argument(name, argument):
    described = DESCRIBED[name]
    with pytest.raises(ValueError, match=rf"^{name}: {argument}: "):
        made(described, **{argument: described.wrong[argument]})


@pytest.mark.parametrize("given", [{"limits": 7.0}, {"alpha": "1"}, {"alpha": True}, [("limit", 7.0)]], ids=str)
def test_a_parameter_that_an_activation_lacks_is_refused(given):
    with pytest.raises(ValueError, match=r"LayerNormMLP: activation_params.*limit, alpha, glu_linear_offset"):
        te.LayerNormMLP(32, 64, activation="clamped_swiglu", activation_params=given)


#: Arguments of a call that a layer without attention to an encoder's output would not read.
OF_A_DECODER = {
    "encoder_output": torch.zeros(8, 2, 32),
    "enc_dec_attn_mask": torch.zeros(2, 1, 1, 8, dtype=torch.bool),
    "enc_dec_attn_mask_type": "padding",
    "enc_dec_window_size": (4, 4),
    "enc_dec_bottom_right_diagonal": True,
}


@pytest.mark.parametrize("argument", OF_A_DECODER)
def test_a_call_with_an_argument_that_nothing_reads_is_refused_by_name(argument):
    said = rf'TransformerLayer \'first\': {argument}: got .*no attention to an encoder.*layer_type="decoder"'
    with pytest.raises(ValueError, match=said):
        te.TransformerLayer(32, 64, 4, name="first")(torch.zeros(8, 2, 32), **{argument: OF_A_DECODER[argument]})


def test_a_quantized_gradient_behind_a_norm_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="fp8_grad"):
        te.LayerNormLinear(32, 48)(torch.randn(8, 32), fp8_grad=True)


@pytest.mark.parametrize(
    "given", [{"limit": -1.0}, {"limit": float("nan")}, {"alpha": float("inf")}, {"glu_linear_offset": float("nan")}]
)
def test_a_parameter_of_an_activation_that_would_make_every_value_wrong_is_refused(given):
    with pytest.raises(
        ValueError, match=r"LayerNormMLP: activation_params.*accepted: finite numbers, a limit of at lea"
    ):
        te.LayerNormMLP(32, 64, activation="clamped_swiglu", activation_params=given)
