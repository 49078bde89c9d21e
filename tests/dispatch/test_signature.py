"""Case B90: a kernel whose signature drifts from the interface is refused at registration."""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from stub_backends import stub

from te_hal.dispatch import list_backends, register_backend, register_composition
from te_hal.dispatch.signature import check_signature, signature_text
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import RegistrationError

RIGHT = "a, b, *, bias=None, out=None, layout='fprop', accumulate=False, out_dtype=None"

# id -> (parameters of a gemm, what the error must name)
DRIFTED = {
    "missing": ("a, b, *, bias=None, out=None, layout='fprop', out_dtype=None", "no parameter 'accumulate'"),
    "extra": (f"{RIGHT}, alpha=1.0", "'alpha'"),
    "extra_positional": (RIGHT.replace("b,", "b, workspace=None,"), "'workspace'"),
    "renamed": (RIGHT.replace("bias", "beta"), "'beta'"),
    "reordered": (RIGHT.replace("a, b", "b, a"), "'b' in the place of 'a'"),
    "keyword_became_positional": (
        RIGHT.replace("*, bias=None,", "bias=None, *,"),
        "'bias' positional or keyword",
    ),
    "positional_became_keyword": (RIGHT.replace("a, b, *,", "a, *, b,"), "'b' keyword-only"),
    "positional_only": (RIGHT.replace("a, b,", "a, b, /,"), "'a' positional-only"),
    "wrong_default": (RIGHT.replace("'fprop'", "'dgrad'"), "'layout' with the default 'dgrad'"),
    "number_for_bool": (RIGHT.replace("False", "0"), "'accumulate' with the default 0"),
    "default_gained": (RIGHT.replace("a, b", "a, b=None"), "'b' with a default"),
    "default_lost": (RIGHT.replace("out_dtype=None", "out_dtype"), "'out_dtype' without the default"),
    "anything_goes": ("*args, **kwargs", "'args'"),
    "hidden_extras": (f"{RIGHT}, **kwargs", "'kwargs'"),
}


def function_with(parameters: str) -> Callable[..., object]:
    namespace: dict[str, Callable[..., object]] = {}
    exec(f"def gemm({parameters}): return None", namespace)  # noqa: S102 - text of this file
    return namespace["gemm"]


@pytest.mark.parametrize("case", DRIFTED)
def test_a_drifted_kernel_is_refused_naming_backend_op_and_parameter(case: str) -> None:
    parameters, named = DRIFTED[case]
    with pytest.raises(RegistrationError) as error:
        register_backend(stub("drifted", kernels={"gemm": function_with(parameters)}))
    assert "backend drifted: gemm" in str(error.value)
    assert named in str(error.value)
    assert signature_text(SCHEMAS["gemm"]) in str(error.value)
    assert "drifted" not in [info.name for info in list_backends()]


def test_the_signature_text_is_python_and_is_accepted() -> None:
    for schema in SCHEMAS.values():
        namespace: dict[str, Callable[..., object]] = {"torch": torch}
        exec(f"def {signature_text(schema)}: pass", namespace)  # noqa: S102 - made from a schema
        check_signature("test", schema, namespace[schema.name])


def test_keyword_only_parameters_may_stand_in_any_order() -> None:
    parameters = "a, b, *, out_dtype=None, accumulate=False, layout='fprop', out=None, bias=None"
    check_signature("test", SCHEMAS["gemm"], function_with(parameters))


def test_annotations_and_plain_strings_for_enums_do_not_matter() -> None:
    def quantize(
        input: "torch.Tensor",
        scale: object = None,
        *,
        amax: object = None,
        out: object = None,
        dtype: object,
        mode: str = "tensor",
        rowwise: bool = True,
        columnwise: bool = False,
        columnwise_order: str = "transposed",
        amax_epsilon: float = 0.0,
        power_of_2: bool = False,
        rounding_seed: object = None,
    ) -> None:
        del input, scale, amax, out, dtype, mode, rowwise, columnwise, columnwise_order, amax_epsilon, power_of_2
        del rounding_seed

    check_signature("test", SCHEMAS["quantize"], quantize)


def with_library(library: object, input: object, *, out: object = None) -> object:
    return library, input, out


def with_option(input: object, *, out: object = None, tile: int) -> object:
    return input, out, tile


class Library:
    """A backend may keep its kernels as methods."""

    def amax(self, input: object, *, out: object = None) -> object:
        return self, input, out

    def __call__(self, input: object, *, out: object = None) -> object:
        return self, input, out


def right_amax(input: object, *, out: object = None) -> object:
    return input, out


@functools.wraps(right_amax)
def wrapped(*args: object, **kwargs: object) -> object:
    return right_amax(*args, **kwargs)


READABLE = {
    "partial_by_position": functools.partial(with_library, "lib"),
    "partial_by_keyword": functools.partial(with_option, tile=128),
    "method": Library().amax,
    "callable_object": Library(),
    "wrapped": wrapped,
}


@pytest.mark.parametrize("case", READABLE)
def test_what_python_can_read_as_the_right_signature_is_accepted(case: str) -> None:
    check_signature("test", SCHEMAS["amax"], READABLE[case])


@pytest.mark.parametrize("kernel", [None, "amax", 3, SimpleNamespace()], ids=repr)
def test_what_cannot_be_called_is_refused_naming_the_op(kernel: object) -> None:
    with pytest.raises(RegistrationError, match=r"backend odd: amax: .*signature cannot be read"):
        register_backend(stub("odd", kernels={"amax": kernel}))


def test_a_kernel_for_an_unknown_op_is_refused() -> None:
    with pytest.raises(RegistrationError, match=r"backend odd: kernels: got a kernel for 'gemmm'; .*gemm,"):
        register_backend(stub("odd", kernels={"gemmm": function_with(RIGHT)}))


def test_a_drifted_composition_is_refused_naming_op_and_parameter() -> None:
    with pytest.raises(RegistrationError, match=r"composition: bias_grad: got no parameter 'out_dtype'"):
        register_composition("bias_grad", lambda grad_output: grad_output)
