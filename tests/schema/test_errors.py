"""Errors: four facts, one root, and the builtin twin that a caller may already catch."""

import pickle

import pytest

from te_hal.schema import errors
from te_hal.schema.errors import TeHalError

TWINS = {
    "ArgumentError": ValueError,
    "ArgumentTypeError": TypeError,
    "StateError": RuntimeError,
    "UnsupportedError": NotImplementedError,
    "NotBuiltError": AttributeError,
    "BackendNotFoundError": ValueError,
    "BackendUnavailableError": RuntimeError,
    "UnknownNameError": KeyError,
    "RegistrationError": ValueError,
    "KernelError": RuntimeError,
    "CheckpointError": RuntimeError,
}


@pytest.mark.parametrize("name", TWINS)
def test_an_error_is_also_the_builtin_that_fits(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, TeHalError)
    assert issubclass(error, TWINS[name])


def test_every_error_class_is_listed_here() -> None:
    found = {name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, TeHalError)}
    assert found == {*TWINS, "TeHalError"}


def test_a_name_of_te_that_is_not_there_yet_is_missing_for_hasattr_too() -> None:
    assert issubclass(errors.NotBuiltError, errors.UnsupportedError)


@pytest.mark.parametrize("name", TWINS)
def test_an_error_keeps_its_facts_through_pickle_as_between_processes(name: str) -> None:
    error = getattr(errors, name)("gemm", got="2", accepted="1", todo="pass 1")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == "gemm: got 2; accepted: 1; pass 1"
    assert (copy.where, copy.got, copy.accepted, copy.todo) == ("gemm", "2", "1", "pass 1")
