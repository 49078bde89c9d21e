"""Constructor and call arguments: what belongs to a later feature, or cannot be, is refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from stub_backends import stub

import te_hal
import te_hal.modules as te
from te_hal.dispatch import register_backend

#: Transformer Engine's Linear: every argument in order with its default (device: "cuda" there, the backend's here).
LINEAR_ARGUMENTS = {
    "in_features": inspect.Parameter.empty,
    "out_features": inspect.Parameter.empty,
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
    "parameters_split": None,
    "device": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "save_original_input": False,
    "name": None,
}
FORWARD_ARGUMENTS = {
    "inp": inspect.Parameter.empty,
    "is_first_microbatch": None,
    "fp8_output": False,
    "fp8_grad": False,
}
NORM_ARGUMENTS = {
    "normalized_shape": None,
    "eps": 1e-5,
    "sequence_parallel": None,
    "params_dtype": None,
    "zero_centered_gamma": False,
    "hidden_size": None,
    "device": None,
    "dtype": None,
    "sm_margin": None,
}


def defaults(function: object) -> dict[str, object]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name != "self"}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (te.Linear, LINEAR_ARGUMENTS),
        (te.Linear.forward, FORWARD_ARGUMENTS),
        (te.LayerNorm, NORM_ARGUMENTS),
        (te.RMSNorm, NORM_ARGUMENTS),
        (te.LayerNorm.forward, {"input": inspect.Parameter.empty}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_arguments_their_order_and_defaults_are_those_of_transformer_engine(function, expected):
    assert list(defaults(function).items()) == list(expected.items())


LATER = {
    "sequence_parallel": True,
    "tp_group": object(),
    "tp_size": 2,
    "parallel_mode": "column",
    "ub_overlap_ag": True,
    "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": True,
    "ub_bulk_dgrad": True,
    "ub_bulk_wgrad": True,
    "ub_name": "qkv",
    "symmetric_ar_type": "multimem_all_reduce",
}


@pytest.mark.parametrize("name", LATER)
def test_an_argument_of_a_later_feature_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"Linear: {name}: got .*leave it out: "):
        te.Linear(32, 32, **{name: LATER[name]})


def test_every_argument_is_either_built_or_refused():
    built = {
        *("in_features", "out_features", "fuse_wgrad_accumulation", "init_method", "bias", "return_bias"),
        *("params_dtype", "parameters_split", "device", "save_original_input", "name"),
        *("get_rng_state_tracker", "rng_tracker_name", "delay_wgrad_compute"),
    }
    assert built | LATER.keys() == LINEAR_ARGUMENTS.keys()


@pytest.mark.parametrize("kind", [te.LayerNorm, te.RMSNorm])
@pytest.mark.parametrize(("name", "value"), [("sequence_parallel", True), ("sm_margin", 2)])
def test_an_argument_of_a_later_feature_is_refused_by_name_in_norms(kind, name, value):
    with pytest.raises(NotImplementedError, match=f"{kind.__name__}: {name}"):
        kind(32, **{name: value})
    kind(32, **{name: 0 if name == "sm_margin" else False})


@pytest.mark.parametrize(
    "size", [0, -1, 2.0, "8", None, True, torch.tensor(8)], ids=lambda value: f"{type(value).__name__}_{value}"
)
@pytest.mark.parametrize("name", ["in_features", "out_features"])
def test_a_size_that_is_no_positive_int_is_refused(name, size):
    with pytest.raises(ValueError, match=f"Linear: {name}: got .*a positive int"):
        te.Linear(**{"in_features": 8, "out_features": 8, name: size})


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64, torch.float64, "float32"], ids=str
)
@pytest.mark.parametrize("make", [lambda dtype: te.Linear(8, 8, params_dtype=dtype), lambda d: te.RMSNorm(8, dtype=d)])
def test_a_dtype_that_parameters_cannot_have_is_refused(make, dtype):
    with pytest.raises(ValueError, match="dtype: got"):
        make(dtype)


SPLITS = {
    "not_divisible": ("q", "k", "v"),
    "wrong_sum": {"q": 32, "k": 8},
    "repeated": ("q", "q_"),
    "no_rows": {"q": 64, "k": 0},
    "empty": (),
    "text": "qk",
    "no_sequence": 2,
    "numbers_as_names": (1, 2),
    "a_dot_in_a_name": ("q.a", "k"),
    "text_as_rows": {"q": "64"},
    "fractions_as_rows": {"q": 32.0, "k": 32.0},
    "bools_as_rows": {"q": 63, "k": True},
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_that_does_not_add_up_is_refused(name):
    with pytest.raises(ValueError, match=r"parameters_split: got .* for out_features=64"):
        te.Linear(32, 64, parameters_split=SPLITS[name])


def test_a_default_dtype_that_no_kernel_takes_is_refused_when_the_module_is_made():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ValueError, match=r"got None, torch's default dtype being torch.float64"):
            te.Linear(8, 8)
    finally:
        torch.set_default_dtype(torch.float32)


FLAGS = {
    **{
        f"Linear: {name}": lambda value, name=name: te.Linear(8, 8, **{name: value})
        for name in ("bias", "return_bias", "fuse_wgrad_accumulation", "save_original_input")
    },
    "LayerNorm: zero_centered_gamma": lambda value: te.LayerNorm(8, zero_centered_gamma=value),
    "RMSNorm: zero_centered_gamma": lambda value: te.RMSNorm(8, zero_centered_gamma=value),
    "Linear: fp8_output": lambda value: te.Linear(8, 8)(torch.zeros(8, 8), fp8_output=value),
    "Linear: fp8_grad": lambda value: te.Linear(8, 8)(torch.zeros(8, 8), fp8_grad=value),
}


@pytest.mark.parametrize("value", ["no", 0, 1, None, torch.tensor(1)], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_not_taken_by_its_truth(name, value):
    with pytest.raises(ValueError, match=f"{name}: got .*accepted: True, False"):
        FLAGS[name](value)


@pytest.mark.parametrize("function", [3, "normal_"], ids=repr)
def test_an_init_method_that_is_no_function_is_refused(function):
    with pytest.raises(ValueError, match=r"Linear: init_method: got .*a function"):
        te.Linear(8, 8, init_method=function)


@pytest.mark.parametrize("device", ["nope", "cpu:x", 1.5], ids=repr)
@pytest.mark.parametrize("kind", [lambda d: te.Linear(8, 8, device=d), lambda d: te.RMSNorm(8, device=d)])
def test_what_is_no_device_is_refused(kind, device):
    with pytest.raises(ValueError, match=r": device: got .*accepted: a torch.device"):
        kind(device)


REPLACED = {
    "Linear: weight": (lambda: te.Linear(16, 8), "weight", (8, 8)),
    "Linear: bias": (lambda: te.Linear(16, 8), "bias", (4,)),
    "LayerNorm: weight": (lambda: te.LayerNorm(16), "weight", (8,)),
    "RMSNorm: weight": (lambda: te.RMSNorm((2, 8)), "weight", (16,)),
    "LayerNorm: bias": (lambda: te.LayerNorm(16), "bias", (8,)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_parameter_of_another_shape_reaches_no_kernel(name):
    make, parameter, shape = REPLACED[name]
    module = make()
    setattr(module, parameter, torch.nn.Parameter(torch.zeros(shape)))
    with pytest.raises(ValueError, match=f"{name}: got shape"):
        module(torch.zeros(4, 2, 8) if name.startswith("RMS") else torch.zeros(4, 16))


@pytest.mark.parametrize("value", [None, 3.0, [[1.0]], "x"], ids=repr)
@pytest.mark.parametrize("make", [lambda: te.Linear(8, 8), lambda: te.LayerNorm(8)], ids=["Linear", "LayerNorm"])
def test_an_input_that_is_no_tensor_is_a_type_error(make, value):
    with pytest.raises(TypeError, match=r"accepted: a torch.Tensor"):
        make()(value)


@pytest.mark.parametrize("shape", [(), (8,), (4, 33), (32, 4)], ids=str)
def test_an_input_of_another_width_is_refused_naming_both(shape):
    with pytest.raises(ValueError, match=r"Linear 'proj': input: got shape .*in_features=32"):
        te.Linear(32, 8, name="proj")(torch.zeros(shape))


def test_parameters_and_input_on_different_devices_are_both_named():
    with pytest.raises(ValueError, match="input on cpu, weight on meta"):
        te.Linear(8, 8, device="meta")(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="input on meta, weight on cpu"):
        te.Linear(8, 8)(torch.zeros(4, 8, device="meta"))
    with pytest.raises(ValueError, match="input on cpu, weight on meta"):
        te.LayerNorm(8, device="meta")(torch.zeros(4, 8))


def test_a_module_made_on_meta_is_filled_later():
    module = torch.nn.Sequential(te.Linear(32, 48, device="meta"), te.LayerNorm(48, device="meta"))
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu")
    for child in module:
        child.reset_parameters()
    assert module[0].weight.std().item() == pytest.approx(0.023, rel=0.1)
    assert not module[0].bias.any()
    assert torch.equal(module[1].weight, torch.ones(48))
    with te.autocast():
        assert module(torch.randn(8, 32)).isfinite().all()


def test_the_device_is_the_one_given_else_the_default_that_the_backend_serves():
    with torch.device("meta"):
        assert te.Linear(8, 8).weight.is_meta
        assert te.Linear(8, 8, device="cpu").weight.device.type == "cpu"
        assert te.RMSNorm(8).weight.is_meta


def test_a_backend_chosen_by_name_leaves_a_module_on_meta_that_is_made_there():
    register_backend(stub("of_cpus", serves=("cpu",)))
    with torch.device("meta"), te_hal.use_backend("of_cpus"):
        layer = te.TransformerLayer(32, 64, 4)
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_a_name_that_nobody_has_is_a_plain_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Lineal'") as caught:
        te.Lineal  # noqa: B018 - looking it up is the point
    assert not isinstance(caught.value, NotImplementedError)


def test_everything_listed_is_there():
    assert all(hasattr(te, name) for name in te.__all__)
    assert te.Linear.__module__ == "te_hal.modules.linear"


def test_a_recipe_that_the_backend_lacks_is_refused_at_the_first_op_before_any_state():
    from counting_backend import Counting  # noqa: PLC0415 - registers a backend

    from te_hal.schema.support import SUPPORTED, Code, Support  # noqa: PLC0415

    Counting(
        "no_wgrad",
        says=lambda call: Support.no(Code.LAYOUT, "has no wgrad") if call.flags.get("layout") == "wgrad" else SUPPORTED,
    )
    module = te.Linear(32, 32)
    with te.autocast(), te_hal.use_backend("no_wgrad"):
        with pytest.raises(NotImplementedError, match="has no wgrad"):
            module(torch.randn(8, 32))
        assert not module.fp8_initialized
        assert not module.fp8
