"""CustomRecipe: a factory that changes is noticed, one that stays keeps its state, and state goes on exactly."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
from custom_recipes import BF16, E4M3, E5M2, MIXED, MODULES, READY, Thousandths, by_role, equal, made, steps

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories as factories
from te_hal.schema.errors import StateError

# Changes


def with_format(dtype: torch.dtype) -> object:
    return lambda _: te.Float8CurrentScalingQuantizer(dtype)


def test_another_factory_on_the_same_object_is_noticed():
    chosen, module = recipe.CustomRecipe(qfactory=factories.mxfp8_factory), made("Linear")
    with te.autocast(recipe=chosen):
        module(torch.ones(64, 160, dtype=BF16), is_first_microbatch=True)
    chosen.qfactory = with_format(E5M2)
    with pytest.warns(UserWarning, match="quantized anew"):
        found = steps(module, chosen)
    assert equal(found, steps(made("Linear"), recipe.CustomRecipe(qfactory=with_format(E5M2))))
    assert not module._fp8_workspaces


SETTINGS = {"dtype": E4M3}


def from_globals(role: object) -> te.Quantizer:  # noqa: ARG001
    return te.Float8CurrentScalingQuantizer(SETTINGS["dtype"])


class Holder:
    def __init__(self) -> None:
        self.dtype = E4M3

    def __call__(self, role: object) -> te.Quantizer:  # noqa: ARG002
        return te.Float8CurrentScalingQuantizer(self.dtype)


def changeable(kind: str) -> tuple[object, object]:
    """A factory, and what changes its answers from E4M3 to E5M2 without changing the object."""
    dtype, kept = E4M3, {"dtype": E4M3}

    def from_closure(role: object) -> te.Quantizer:  # noqa: ARG001
        return te.Float8CurrentScalingQuantizer(dtype)

    def rebind() -> None:
        nonlocal dtype
        dtype = E5M2

    def from_mapping(role: object) -> te.Quantizer:  # noqa: ARG001
        return te.Float8CurrentScalingQuantizer(kept["dtype"])

    holder = Holder()
    return {
        "closure": (from_closure, rebind),
        "mapping in a closure": (from_mapping, lambda: kept.update(dtype=E5M2)),
        "global": (from_globals, lambda: SETTINGS.update(dtype=E5M2)),
        "attribute": (holder, lambda: setattr(holder, "dtype", E5M2)),
        "partial": (functools.partial(from_mapping), lambda: kept.update(dtype=E5M2)),
    }[kind]


@pytest.mark.parametrize("kind", ["closure", "mapping in a closure", "global", "attribute", "partial"])
def test_a_factory_that_changes_inside_is_asked_again(kind, monkeypatch):
    monkeypatch.setitem(SETTINGS, "dtype", E4M3)
    factory, change = changeable(kind)
    chosen, module = recipe.CustomRecipe(qfactory=factory), made("Linear")
    assert equal(steps(module, chosen), steps(made("Linear"), recipe.CustomRecipe(qfactory=with_format(E4M3))))
    change()
    assert equal(steps(module, chosen), steps(made("Linear"), recipe.CustomRecipe(qfactory=with_format(E5M2))))


def test_a_factory_that_stays_is_not_asked_again():
    calls = []

    def factory(role: object) -> te.Quantizer:
        calls.append(role)
        return te.IdentityQuantizer()

    module = made("Linear")
    steps(module, recipe.CustomRecipe(qfactory=factory), 3)
    steps(module, recipe.CustomRecipe(qfactory=factory), 3)
    assert len(calls) == 5


LOG: list[str] = []


def logging_factory(role: te.QuantizerRole | None) -> te.Quantizer:
    LOG.append(str(role))
    return te.MXFP8Quantizer(E4M3)


@pytest.mark.parametrize(
    "factory",
    [logging_factory, by_role(weight=Thousandths, input=lambda: te.Float8CurrentScalingQuantizer(E5M2))],
    ids=["that keeps a record", "that makes objects"],
)
def test_answers_that_stay_keep_quantizers_and_weights(factory):
    """Modules share a factory: what one of them asks is a change to the other, yet nothing that matters."""
    first, second = made("Linear"), made("Linear", seed=1)
    x = torch.randn(64, 160, dtype=BF16)
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        first(x, is_first_microbatch=True)
        second(x, is_first_microbatch=True)
    kept = dict(first._fp8_workspaces), first.quantizers["scaling_fwd"][0]
    LOG.append("a change")
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        first(x, is_first_microbatch=False)
    assert first._fp8_workspaces == kept[0]
    assert first.quantizers["scaling_fwd"][0] is kept[1]


# State


def test_the_state_behind_requests_survives_a_change_of_other_roles():
    module = made("Linear")
    requests = {"input": te.DelayedScalingRequest, "grad_output": te.DelayedScalingRequest}
    steps(module, recipe.CustomRecipe(qfactory=by_role(**requests)), 3)
    before = module.fp8_meta["scaling_fwd"].delayed
    steps(
        module, recipe.CustomRecipe(qfactory=by_role(**requests, weight=lambda: te.Float8CurrentScalingQuantizer(E5M2)))
    )
    assert module.fp8_meta["scaling_fwd"].delayed is before


def resumed(module: torch.nn.Module, name: str) -> torch.nn.Module:
    """Another module that has loaded the state through a file, without pickle."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = made(name, seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mixed", ["delayed and current", "delayed gradients"])
def test_saved_steps_go_on_bit_for_bit(mixed, name):
    chosen = recipe.CustomRecipe(qfactory=MIXED[mixed])
    straight, halfway = made(name), made(name)
    expected = steps(straight, chosen, 6)
    steps(halfway, chosen, 3)
    other = resumed(halfway, name)
    assert torch.equal(other.get_extra_state(), halfway.get_extra_state())
    assert equal(steps(other, chosen, 3, first=3), expected)
    assert torch.equal(other.get_extra_state(), straight.get_extra_state())


def test_the_state_of_a_module_without_requests_has_no_bytes():
    module = made("Linear")
    steps(module, recipe.CustomRecipe(qfactory=factories.mxfp8_factory))
    assert module.get_extra_state().numel() == 0


def test_a_loaded_state_of_other_slots_is_refused():
    module = made("Linear")
    steps(module, recipe.CustomRecipe(qfactory=MIXED["delayed gradients"]))
    other = resumed(module, "Linear")
    with pytest.raises(StateError, match=r"slots \[0\], whose state was loaded"):
        steps(other, recipe.CustomRecipe(qfactory=factories.mxfp8_factory))
    other.forget_scaling_state()
    steps(other, recipe.CustomRecipe(qfactory=factories.mxfp8_factory))


@pytest.mark.parametrize("remake", [copy.deepcopy], ids=["deepcopy"])
def test_a_copied_module_goes_on_as_the_original(remake):
    chosen = recipe.CustomRecipe(qfactory=MIXED["delayed and current"])
    module = made("Linear")
    steps(module, chosen, 3)
    assert equal(steps(remake(module), chosen, 2, first=3), steps(module, chosen, 2, first=3))


def test_calibrating_leaves_results_unquantized_and_raises_the_amax_of_requests():
    module = made("Linear")
    chosen = recipe.CustomRecipe(qfactory=by_role(input=te.DelayedScalingRequest))
    x = torch.full((64, 160), -5.0, dtype=BF16)
    with te.autocast(enabled=False, calibrating=True, recipe=chosen):
        y = module(x)
    assert torch.equal(y, module(x))
    assert module.fp8_meta["scaling_fwd"].delayed.amax_history[0].tolist() == [5.0]


@pytest.mark.parametrize("factory", READY.values(), ids=list(READY))
def test_a_module_that_ran_under_a_factory_with_a_name_pickles_and_goes_on_alike(factory):
    chosen, module = recipe.CustomRecipe(qfactory=factory[0]), made("Linear")
    steps(module, chosen, 2)
    pickled = pickle.loads(pickle.dumps(module))
    assert equal(steps(pickled, chosen, first=2), steps(module, chosen, first=2))


def test_a_module_that_ran_under_a_lambda_is_saved_by_its_state():
    chosen, module = recipe.CustomRecipe(qfactory=with_format(E4M3)), made("Linear")
    steps(module, chosen)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(module)
    pickle.dumps(module.state_dict())
