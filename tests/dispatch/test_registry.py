"""Registration by API, and what a backend must state about itself."""

import dataclasses

import pytest
import torch
from stub_backends import amax_that, stub, yes

import te_hal
from te_hal import ops
from te_hal.dispatch import ANY_DEVICE, Backend, list_backends, register_backend, register_composition
from te_hal.schema.errors import BackendNotFoundError, RegistrationError


def names() -> list[str]:
    return [info.name for info in list_backends()]


def test_a_registered_backend_can_be_selected_until_reset() -> None:
    register_backend(stub("mine"))
    te_hal.set_backend("mine")
    assert ops.amax(torch.zeros(3)).item() == 1.0
    te_hal.reset()
    assert "mine" not in names()
    with pytest.raises(BackendNotFoundError):
        te_hal.set_backend("mine")


@pytest.mark.parametrize("taken", ["mine", "null", "cpu_reference"])
def test_a_name_that_is_taken_is_refused(taken: str) -> None:
    register_backend(stub("mine"))
    with pytest.raises(RegistrationError, match=rf"backend {taken}: got a name that is taken"):
        register_backend(stub(taken))


# id -> (fields, what the error names)
WRONG_FIELDS = {
    "name_is_no_identifier": ({"name": "my chip"}, "name"),
    "name_is_no_text": ({"name": 7}, "name"),
    "kernels_is_a_list": ({"kernels": [amax_that]}, "kernels"),
    "serves_nothing": ({"serves": frozenset()}, "serves"),
    "serves_is_text": ({"serves": "cpu"}, "serves"),
    "default_for_is_a_set_of_devices": ({"default_for": frozenset({torch.device("cpu")})}, "default_for"),
    "claims_every_device": ({"default_for": frozenset({ANY_DEVICE})}, "default_for"),
    "claims_more_than_it_serves": (
        {"serves": frozenset({"cpu"}), "default_for": frozenset({"cuda"})},
        "default_for",
    ),
    "supports_is_no_function": ({"supports": True}, "supports"),
    "usable_is_no_function": ({"usable": True}, "usable"),
    "gemm_copies_is_no_function": ({"gemm_copies": None}, "gemm_copies"),
    "columnwise_order_is_unknown": ({"columnwise_order": "sideways"}, "columnwise_order"),
    "description_is_no_text": ({"description": None}, "description"),
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_a_wrong_field_is_refused_by_name(case: str) -> None:
    fields, named = WRONG_FIELDS[case]
    with pytest.raises(RegistrationError, match=rf"backend .*: {named}: got "):
        register_backend(dataclasses.replace(stub("odd"), **fields))
    assert "odd" not in names()


def test_what_is_no_backend_is_refused() -> None:
    with pytest.raises(RegistrationError, match=r"got a dict; accepted: a te_hal.dispatch.Backend"):
        register_backend({"name": "odd"})  # type: ignore[arg-type]


def test_kernels_added_after_registration_are_not_seen() -> None:
    kernels = {"amax": amax_that(lambda _: None)}
    backend = Backend(name="mine", kernels=kernels, serves=frozenset({"cpu"}), supports=yes)
    kernels["gemm"] = kernels["amax"]
    assert sorted(backend.kernels) == ["amax"]


def test_only_an_optional_op_may_be_composed() -> None:
    with pytest.raises(RegistrationError, match=r"'gemm'; accepted: .*activation_fwd"):
        register_composition("gemm", lambda a, b: (a, b))


def test_a_second_composition_is_refused() -> None:
    def bias_grad(grad_output: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return grad_output.sum(0, dtype=out_dtype)

    with pytest.raises(RegistrationError, match=r"composition of bias_grad: got a second composition"):
        register_composition("bias_grad", bias_grad)
