"""GroupedLinear's arguments: Transformer Engine's names, order and defaults; what cannot be is refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from grouped_layers import INS, OUTS, data, grouped

import te_hal.modules as te
from te_hal import recipe

NEEDED = inspect.Parameter.empty
ARGUMENTS = {
    "num_gemms": NEEDED,
    "in_features": NEEDED,
    "out_features": NEEDED,
    "sequence_parallel": False,
    "fuse_wgrad_accumulation": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "init_method": None,
    "bias": True,
    "return_bias": False,
    "params_dtype": None,
    "parallel_mode": None,
    "device": None,
    "ub_overlap_rs": False,
    "ub_overlap_ag": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "save_original_input": False,
    "single_grouped_weight": False,
    "single_grouped_bias": False,
    "name": None,
    "use_grouped_tensor": None,
}
FORWARD = {"inp": NEEDED, "m_splits": NEEDED, "is_first_microbatch": None, "out": None, "dgrad_out": None}
LATER = {
    "sequence_parallel": True,
    "tp_group": object(),
    "tp_size": 2,
    "parallel_mode": "column",
    "ub_overlap_rs": True,
    "ub_overlap_ag": True,
    "ub_name": "fc1",
    "use_grouped_tensor": True,
}


@pytest.mark.parametrize(("function", "expected"), [(te.GroupedLinear, ARGUMENTS), (te.GroupedLinear.forward, FORWARD)])
def test_arguments_their_order_and_defaults_are_those_of_transformer_engine(function, expected):
    found = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name != "self"}
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize("name", LATER)
def test_an_argument_of_a_later_feature_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"GroupedLinear: {name}: got .*leave it out: "):
        te.GroupedLinear(2, INS, OUTS, **{name: LATER[name]})


def test_products_one_by_one_may_be_asked_for_by_name():
    assert te.GroupedLinear(2, INS, OUTS, use_grouped_tensor=False).num_gemms == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_gemms": 0}, "num_gemms"),
        ({"num_gemms": True}, "num_gemms"),
        ({"in_features": -1}, "in_features"),
        ({"out_features": 2.0}, "out_features"),
        ({"bias": "no"}, "bias"),
        ({"single_grouped_weight": 1}, "single_grouped_weight"),
        ({"single_grouped_bias": None}, "single_grouped_bias"),
        ({"params_dtype": torch.float8_e4m3fn}, "params_dtype"),
        ({"init_method": "normal"}, "init_method"),
        ({"device": "nowhere"}, "device"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_the_constructor_refuses_what_cannot_be(arguments, named):
    with pytest.raises(ValueError, match=f"GroupedLinear: {named}: got .*accepted: "):
        te.GroupedLinear(**{"num_gemms": 2, "in_features": INS, "out_features": OUTS, **arguments})


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([32, 32], "got 2 sizes; accepted: 4"),
        ([32, 32, 32, 32, 0], "got 5 sizes"),
        ([64, -32, 32, 32], "got -32 at 1"),
        ([64, 64, 32, 0], "got 160 rows in all, for an input of 128"),
        (torch.tensor([32.0, 32, 32, 32]), "got a tensor of torch.float32"),
        (torch.tensor([[32, 32, 32, 32]]), "shape \\(1, 4\\)"),
        (torch.tensor([True, False, True, True]), "torch.bool"),
    ],
    ids=["fewer", "more", "negative", "too_many_rows", "floats", "two_dimensions", "bools"],
)
def test_wrong_splits_are_refused_before_anything_has_changed(splits, message):
    module = grouped()
    with pytest.raises(ValueError, match=f"GroupedLinear: m_splits: .*{message}"), te.autocast():
        module(data(128)[0], splits)
    assert not module.fp8_initialized


@pytest.mark.parametrize("splits", [None, 128, [32.0, 32, 32, 32], "32", [True, 32, 32, 32]], ids=repr)
def test_splits_of_another_type_are_a_type_error(splits):
    with pytest.raises(TypeError, match=r"GroupedLinear: m_splits: got .*accepted: a list of ints"):
        grouped()(data(128)[0], splits)


@pytest.mark.parametrize(
    ("chosen", "rows", "multiple"),
    [(recipe.DelayedScaling, 12, 8), (recipe.MXFP8BlockScaling, 16, 32), (recipe.NVFP4BlockScaling, 24, 16)],
    ids=["delayed", "mxfp8", "nvfp4"],
)
def test_a_split_that_fp8_cannot_take_is_named_with_the_way_out(chosen, rows, multiple):
    module, splits = grouped(), [32, rows, 0, 32]
    message = rf"input of group 1: got .*m_splits\[1\] .*Fp8Padding.*{multiple}"
    with pytest.raises(ValueError, match=message), te.autocast(recipe=chosen()):
        module(data(sum(splits))[0], splits)
    assert not module.fp8_initialized
    module(data(sum(splits))[0], splits)


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("out", torch.empty(128, OUTS)),
        ("out", torch.empty(127, OUTS, dtype=torch.bfloat16)),
        ("out", torch.empty(OUTS, 128, dtype=torch.bfloat16).t()),
        ("out", torch.empty(128, OUTS, dtype=torch.bfloat16, requires_grad=True)),
        ("dgrad_out", torch.empty(128, OUTS, dtype=torch.bfloat16)),
        ("dgrad_out", [1.0]),
    ],
    ids=["dtype", "rows", "strides", "requires_grad", "columns", "list"],
)
def test_a_buffer_that_a_result_cannot_go_into_is_refused(name, buffer):
    with pytest.raises(ValueError, match=f"GroupedLinear: {name}: got .*contiguous, without gradient"):
        grouped()(data(128)[0], [32] * 4, **{name: buffer})


def test_an_input_of_another_width_dtype_or_type_is_refused():
    module = grouped()
    with pytest.raises(ValueError, match=r"input: got shape \(128, 16\).*in_features=32"):
        module(torch.zeros(128, 16, dtype=torch.bfloat16), [32] * 4)
    with pytest.raises(ValueError, match=r"input of torch.float32, weight0 of torch.bfloat16"):
        module(torch.zeros(128, INS), [32] * 4)
    with pytest.raises(TypeError, match="got a list"):
        module([[1.0]], [32] * 4)


def test_a_weight_of_another_shape_is_refused_by_its_name():
    module = grouped()
    module.weight2 = torch.nn.Parameter(torch.zeros(8, INS, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"GroupedLinear: weight2: got shape \(8, 32\)"):
        module(data(128)[0], [32] * 4)


def test_a_missing_main_grad_is_refused_in_the_forward():
    with pytest.raises(RuntimeError, match="main_grad"):
        grouped(fuse_wgrad_accumulation=True)(data(128)[0], [32] * 4)


def test_stacked_weights_in_fp8_are_refused_at_construction():
    message = "single_grouped_weight: got a stacked weight inside quantized_model_init"
    inside = te.quantized_model_init(recipe=recipe.Float8CurrentScaling())
    with pytest.raises(NotImplementedError, match=message), inside:
        te.GroupedLinear(2, INS, OUTS, single_grouped_weight=True)


def test_an_input_kept_unquantized_under_delayed_scaling_is_refused():
    with pytest.raises(ValueError, match="save_original_input: got delayed scaling"), te.autocast():
        grouped(save_original_input=True)(data(128)[0], [32] * 4)


def test_a_factory_is_asked_about_every_group_under_its_own_kind_of_module():
    asked = []

    def factory(role):
        asked.append(role)
        return te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)

    module = grouped(2, name="experts")
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        module(data(64)[0], [32, 32])
    kinds = [None if role is None else (role.module_type, role.tensor_type, role.name) for role in asked]
    of_group = [("grouped_linear", "input", "experts"), ("grouped_linear", "weight", "experts"), None]
    assert kinds[:6] == of_group * 2
    assert kinds[6:10] == [("grouped_linear", "grad_output", "experts"), None] * 2


def test_groups_that_a_factory_quantizes_differently_each_get_their_own():
    weights_seen = []

    def factory(role):
        if role is not None and role.tensor_type == "weight":
            weights_seen.append(role)
            if len(weights_seen) % 2 == 0:
                return te.IdentityQuantizer()
        return te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)

    module = grouped(2, bias=False)
    x, _ = data(64)
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        y = module(x, [32, 32])
    exact = torch.cat([x[:32].float() @ module.weight0.float().T, x[32:].float() @ module.weight1.float().T])
    errors = [(part - of).norm() / of.norm() for part, of in zip(y.float().split(32), exact.split(32), strict=True)]
    assert 1e-3 < errors[1] < errors[0] < 0.1


def test_second_derivatives_are_refused():
    module = grouped(2)
    y = module(data(64)[0].requires_grad_(), [32, 32])
    with pytest.raises(NotImplementedError, match="GroupedLinear: backward: got create_graph=True"):
        torch.autograd.grad(y.sum(), module.weight0, create_graph=True)
