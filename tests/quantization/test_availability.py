"""is_*_available and the default recipe answer for the backend in force."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from stub_backends import stub

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.dispatch import register_backend
from te_hal.schema.formats import ScalingMode
from te_hal.schema.support import SUPPORTED, Call, Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable

SENTENCE = "the toy chip multiplies bf16 and nothing else"
QUESTIONS = {
    "is_fp8_available": ScalingMode.TENSOR,
    "is_fp8_block_scaling_available": ScalingMode.BLOCK_1X128,
    "is_mxfp8_available": ScalingMode.MXFP8,
    "is_mtfp8_block_scaling_available": ScalingMode.MTFP8_1X128,
}


def toy(lacks: Callable[[Call], bool], serves: frozenset[str] = frozenset({"cpu"})) -> None:
    with te_hal.use_backend("cpu_reference"):
        kernels = dict(te_hal.get_backend().kernels)

    def supports(call: Call) -> Support:
        return Support.no(Code.MODE, SENTENCE) if lacks(call) else SUPPORTED

    register_backend(stub("toy", kernels=kernels, supports=supports, serves=serves))


def casts(call: Call) -> bool:
    return call.op == "quantize"


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_reference_backend_runs_every_built_recipe(question):
    assert getattr(te, question)() is True
    assert getattr(te, question)(return_reason=True) == (True, "")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_no_comes_with_the_backends_sentence(question):
    toy(casts)
    with te_hal.use_backend("toy"):
        assert getattr(te, question)() is False
        assert getattr(te, question)(return_reason=True) == (False, SENTENCE)
        assert te.is_bf16_available()


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_is_about_its_own_scaling_mode(question):
    toy(lambda call: call.op == "quantize" and call.flags["mode"] is QUESTIONS[question])
    with te_hal.use_backend("toy"):
        assert [name for name in QUESTIONS if not getattr(te, name)()] == [question]


def test_a_backend_of_another_device_is_asked_about_that_device():
    asked = []
    toy(lambda call: asked.append(call.device.type) or False, frozenset({"xpu"}))
    with te_hal.use_backend("toy"):
        assert te.is_mxfp8_available()
    assert set(asked) == {"xpu"}


def test_without_any_backend_the_answer_is_no_and_says_why():
    with torch.device("meta"):
        available, reason = te.is_fp8_available(return_reason=True)
    assert available is False
    assert "meta" in reason


def test_the_default_recipe_is_delayed_scaling_where_that_can_be():
    assert te.get_default_recipe() == recipe.DelayedScaling()
    assert te.get_default_recipe() is not te.get_default_recipe()


def test_the_default_recipe_is_the_first_one_that_the_backend_has():
    toy(lambda call: call.flags.get("mode") is ScalingMode.TENSOR)
    with te_hal.use_backend("toy"):
        assert te.get_default_recipe() == recipe.Float8BlockScaling()
        module = te.Linear(32, 32)
        with te.autocast():
            module(torch.ones(16, 32)).sum().backward()
        assert module.fp8_meta["recipe"] == recipe.Float8BlockScaling()
    assert te.get_default_recipe() == recipe.DelayedScaling()
