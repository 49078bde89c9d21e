"""support_for answers whether resolve would find a kernel, and leaves no trace."""

from __future__ import annotations

import inspect

import pytest
import torch
from stub_backends import refuse, stub

import te_hal
from te_hal.dispatch import ask_backend, current_memo, register_backend, registry, resolve, support_for
from te_hal.schema.errors import BackendUnavailableError, StateError, UnsupportedError
from te_hal.schema.support import Call, Code, Support

AMAX = Call("amax", torch.device("cpu"), {"input": torch.float32, "out": None}, {})


def test_yes_where_the_backend_has_it():
    register_backend(stub("toy"))
    with te_hal.use_backend("toy"):
        assert support_for(AMAX)
        assert resolve(AMAX).backend.name == "toy"


def test_no_with_the_sentence_of_the_backend_that_is_asked_first():
    register_backend(stub("toy", supports=refuse("not that one")))
    register_backend(stub("other", supports=refuse("nor this one")))
    with te_hal.use_backend("toy"), te_hal.use_policy(te_hal.Policy(fallback=("other",))):
        answer = support_for(AMAX)
        assert not answer
        assert answer.sentence == "not that one"
        with pytest.raises(UnsupportedError, match="not that one"):
            resolve(AMAX)


def test_no_where_there_is_no_kernel():
    register_backend(stub("toy", kernels={}))
    with te_hal.use_backend("toy"):
        assert support_for(AMAX).code is Code.NO_KERNEL


def test_a_fallback_makes_it_a_yes_and_nothing_is_counted_or_announced():
    register_backend(stub("toy", supports=refuse("not that one")))
    memo = current_memo()
    with te_hal.use_backend("toy"), te_hal.use_policy(te_hal.Policy(fallback=("cpu_reference",))):
        assert support_for(AMAX)
        assert current_memo() == {}
    assert te_hal.fallback_report() == {}
    assert current_memo() is memo


def test_an_optional_op_is_composed_where_the_backend_lacks_it():
    optional = next(op for op in te_hal.schema.catalog.SCHEMAS.values() if op.optional and op.name == "bias_grad")
    call = Call(optional.name, torch.device("cpu"), {"grad_output": torch.float32}, {"out_dtype": None})
    register_backend(stub("toy"))
    with te_hal.use_backend("toy"):
        assert support_for(call)
        assert inspect.unwrap(resolve(call).kernel) is registry.REGISTRY.compositions["bias_grad"].function


def test_without_a_backend_for_the_device_it_raises_as_resolve_does():
    call = Call("amax", torch.device("meta"), {"input": torch.float32, "out": None}, {})
    for ask in (support_for, resolve):
        with pytest.raises(BackendUnavailableError, match="meta"):
            ask(call)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, Code.YES),
        ({"usable": lambda: Support.no(Code.ENVIRONMENT, "unplugged")}, Code.ENVIRONMENT),
        ({"serves": ("meta",)}, Code.DEVICE),
        ({"kernels": {}}, Code.NO_KERNEL),
        ({"supports": refuse("not that one")}, Code.DTYPE),
    ],
    ids=["yes", "unusable", "device", "no_kernel", "no"],
)
def test_a_backend_asked_by_itself_answers_with_the_first_reason(changes, code):
    backend = stub("toy", **changes)
    register_backend(backend)
    assert ask_backend(backend, AMAX).code is code


def test_a_backend_that_is_not_usable_is_asked_nothing_else():
    def never(_: Call) -> Support:
        raise AssertionError("asked")

    backend = stub("toy", supports=never, usable=lambda: Support.no(Code.ENVIRONMENT, "unplugged"))
    register_backend(backend)
    assert ask_backend(backend, AMAX).sentence == "unplugged"


def test_an_answer_that_is_no_support_is_an_error_of_the_backend():
    backend = stub("toy", supports=lambda _: True)
    register_backend(backend)
    with pytest.raises(StateError, match="got True for amax"):
        ask_backend(backend, AMAX)
