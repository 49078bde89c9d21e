"""CustomRecipe: answers, requests and fields that are refused by name."""

from __future__ import annotations

import pytest
import torch
from custom_recipes import BF16, E4M3, Thousandths, by_role, made, steps

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories as factories
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, UnsupportedError


def forward(module: torch.nn.Module, factory: object) -> None:
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        module(torch.ones(64, 160, dtype=BF16))


class OnlyQuantizes:
    def quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class MultipliesItself(Thousandths):
    custom = True


class Unknown(te.QuantizerRequest):
    pass


def test_everything_that_is_missing_is_listed_at_once_and_nothing_has_changed():
    answers = iter([None, OnlyQuantizes(), object(), Unknown(), te.IdentityQuantizer])
    module = made("Linear", label="fc")
    steps(module, recipe.MXFP8BlockScaling())
    with pytest.raises(ArgumentError, match=r"Linear 'fc': CustomRecipe\.qfactory") as raised:
        forward(module, lambda _: next(answers))
    got = raised.value.got
    assert "scaling_fwd slot 0 (module_type=linear|tensor_type=input|name=fc) None" in got
    assert "slot 1 (module_type=linear|tensor_type=weight|name=fc) a OnlyQuantizes without dequantize" in got
    assert "slot 2 (None) a object without quantize and dequantize" in got
    assert "scaling_bwd slot 0 (module_type=linear|tensor_type=grad_output|name=fc) a Unknown" in got
    assert "slot 1 (None) the class IdentityQuantizer in place of an object" in got
    assert module.fp8_meta["recipe"] == recipe.MXFP8BlockScaling()


def test_a_quantizer_that_multiplies_by_itself_is_refused_by_name():
    with pytest.raises(ArgumentError, match="qgemm"):
        forward(made("Linear"), lambda _: MultipliesItself())


def test_unequal_requests_are_refused():
    factory = by_role(
        input=lambda: te.DelayedScalingRequest(margin=1), weight=te.DelayedScalingRequest, grad_output=Thousandths
    )
    with pytest.raises(ArgumentError, match=r"2 different requests.*margin=1"):
        forward(made("Linear"), factory)


def test_families_that_do_not_multiply_are_refused_by_name():
    factory = by_role(input=lambda: te.MXFP8Quantizer(E4M3), weight=lambda: te.Float8BlockQuantizer(E4M3))
    with pytest.raises(UnsupportedError, match="'block_128x128' and 'mxfp8'"):
        forward(made("Linear"), factory)


def test_a_dequantize_of_another_shape_is_refused():
    class Wrong(Thousandths):
        def dequantize(self, made: object) -> torch.Tensor:  # noqa: ARG002
            return torch.ones(2)

    with pytest.raises(ArgumentError, match=r"Wrong.dequantize.*\(96, 160\)"):
        forward(made("Linear"), lambda _: Wrong())


def test_an_error_of_the_factory_comes_out_as_it_is():
    def factory(role: object) -> None:  # noqa: ARG001
        raise KeyError("mine")

    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)), pytest.raises(KeyError, match="mine"):
        made("Linear")(torch.ones(64, 160, dtype=BF16))


BAD = {
    "no callable": ({"qfactory": 3}, ArgumentTypeError, "qfactory"),
    "format": ({"fp8_format": recipe.Format.E4M3}, UnsupportedError, "fp8_format"),
    "attention": ({"fp8_dpa": True}, UnsupportedError, "fp8_dpa"),
    "override": ({"backward_override": "bf16"}, ArgumentError, "backward_override"),
    "alignment": ({"quantization_alignment": 0}, ArgumentError, "quantization_alignment"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_is_refused_by_name(case):
    fields, error, name = BAD[case]
    with pytest.raises(error, match=f"CustomRecipe.{name}"):
        recipe.CustomRecipe(**{"qfactory": factories.mxfp8_factory, **fields})


def test_a_request_is_checked_as_its_recipe_is():
    with pytest.raises(ArgumentError, match="amax_history_len"):
        te.DelayedScalingRequest(amax_history_len=0)
