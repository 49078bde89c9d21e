"""Arguments of the modules made of several layers: Transformer Engine's, each built or refused by name."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import pytest
import torch

import te_hal.modules as te

NEEDED = inspect.Parameter.empty


class Described(NamedTuple):
    """A module, what it needs, its arguments with their defaults, and values that are refused."""

    kind: type[torch.nn.Module]
    sizes: tuple[int, ...]
    arguments: dict[str, object]
    forward: dict[str, object]
    later: dict[str, object]
    wrong: dict[str, object]


PARALLEL = {"sequence_parallel": True, "tp_group": object(), "tp_size": 2, "delay_wgrad_compute": True}
OVERLAP = dict.fromkeys(
    ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"), True
)
COMMON_WRONG = {
    "bias": "False",
    "normalization": "BatchNorm",
    "zero_centered_gamma": 1,
    "fuse_wgrad_accumulation": None,
    "params_dtype": torch.float64,
    "device": "no such device",
    "init_method": "normal",
    "get_rng_state_tracker": te.RNGStatesTracker(),
}

LAYERNORM_LINEAR = Described(
    te.LayerNormLinear,
    (32, 48),
    {
        "in_features": NEEDED,
        "out_features": NEEDED,
        "eps": 1e-5,
        "sequence_parallel": False,
        "fuse_wgrad_accumulation": False,
        "tp_group": None,
        "tp_size": 1,
        "get_rng_state_tracker": None,
        "init_method": None,
        "bias": True,
        "normalization": "LayerNorm",
        "return_bias": False,
        "params_dtype": None,
        "parallel_mode": None,
        "return_layernorm_output": False,
        "return_layernorm_output_gathered": False,
        "parameters_split": None,
        "zero_centered_gamma": False,
        "device": None,
        "ub_overlap_ag": False,
        "ub_overlap_rs": False,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_wgrad": False,
        "ub_bulk_dgrad": False,
        "ub_name": None,
        "delay_wgrad_compute": False,
        "symmetric_ar_type": None,
        "name": None,
    },
    {"inp": NEEDED, "is_first_microbatch": None, "fp8_output": False, "fp8_grad": False},
    PARALLEL
    | OVERLAP
    | {
        "parallel_mode": "column",
        "return_layernorm_output_gathered": True,
        "ub_name": "qkv",
        "symmetric_ar_type": "multimem_all_reduce",
    },
    COMMON_WRONG | {"eps": -1.0, "in_features": 0, "out_features": 2.0, "parameters_split": ("a", "b", "c", "d", "e")},
)

LAYERNORM_MLP = Described(
    te.LayerNormMLP,
    (32, 64),
    {
        "hidden_size": NEEDED,
        "ffn_hidden_size": NEEDED,
        "eps": 1e-5,
        "sequence_parallel": False,
        "return_bias": False,
        "get_rng_state_tracker": None,
        "tp_group": None,
        "tp_size": 1,
        "init_method": None,
        "bias": True,
        "normalization": "LayerNorm",
        "activation": "gelu",
        "activation_params": None,
        "output_layer_init_method": None,
        "fuse_wgrad_accumulation": False,
        "params_dtype": None,
        "return_layernorm_output": False,
        "return_layernorm_output_gathered": False,
        "seq_length": None,
        "micro_batch_size": None,
        "set_parallel_mode": False,
        "zero_centered_gamma": False,
        "device": None,
        "ub_overlap_ag": False,
        "name": None,
        "ub_overlap_rs": False,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": False,
        "ub_bulk_wgrad": False,
        "delay_wgrad_compute": False,
        "symmetric_ar_type": None,
        "checkpoint": False,
    },
    {"inp": NEEDED, "is_first_microbatch": None},
    PARALLEL
    | OVERLAP
    | {
        "return_layernorm_output_gathered": True,
        "seq_length": 128,
        "micro_batch_size": 2,
        "set_parallel_mode": True,
        "symmetric_ar_type": "multimem_all_reduce",
        "checkpoint": True,
    },
    COMMON_WRONG
    | {
        "eps": float("nan"),
        "hidden_size": True,
        "ffn_hidden_size": -8,
        "activation": "tanh",
        "activation_params": {"limit": 3.0},  # gelu has none
        "output_layer_init_method": 1,
    },
)

DESCRIBED = {"LayerNormLinear": LAYERNORM_LINEAR, "LayerNormMLP": LAYERNORM_MLP}
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
    with pytest.raises(NotImplementedError, match=rf"{name}: {argument}: got .*not built yet"):
        made(described, **{argument: described.later[argument]})


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, found in DESCRIBED.items() for argument in found.wrong]
)
def test_a_wrong_value_is_refused_at_construction_naming_the_argument(name, argument):
    described = DESCRIBED[name]
    with pytest.raises(ValueError, match=rf"{name}.*{argument}|{argument}.*{name}|{name}: "):
        made(described, **{argument: described.wrong[argument]})


@pytest.mark.parametrize("given", [{"limits": 7.0}, {"alpha": "1"}, {"alpha": True}, [("limit", 7.0)]], ids=str)
def test_a_parameter_that_an_activation_lacks_is_refused(given):
    with pytest.raises(ValueError, match=r"LayerNormMLP: activation_params.*limit, alpha, glu_linear_offset"):
        te.LayerNormMLP(32, 64, activation="clamped_swiglu", activation_params=given)


def test_a_quantized_gradient_behind_a_norm_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="fp8_grad"):
        te.LayerNormLinear(32, 48)(torch.randn(8, 32), fp8_grad=True)
