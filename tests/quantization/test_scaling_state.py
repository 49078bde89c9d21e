"""Scaling state: what changes of recipe do to it, which state is whose, and a user's callables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import te_hal.modules as te
from te_hal.quantization.scaling_state import (
    BACKWARD_ROLES,
    FORWARD_ROLES,
    DelayedScalingState,
    StatelessScalingState,
    make_scaling_state,
)
from te_hal.recipe import DelayedScaling, Float8CurrentScaling, Format, Recipe
from te_hal.schema.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from te_hal.schema.formats import ElementFormat

CPU = torch.device("cpu")
FLOAT32_MAX = float(np.finfo(np.float32).max)


def state(*, forward: bool = True, **fields: object) -> DelayedScalingState:
    roles = FORWARD_ROLES if forward else BACKWARD_ROLES
    return DelayedScalingState(DelayedScaling(**fields), roles, forward=forward, device=CPU)


def with_history(rows: int, **fields: object) -> DelayedScalingState:
    """Row i holds 10 * i + slot; the running amax is in row 0; scales came from an update."""
    made = state(amax_history_len=rows, **fields)
    made.amax_history.copy_(torch.arange(rows)[:, None] * 10.0 + torch.arange(3.0))
    made.scale.copy_(torch.tensor([2.0, 3.0, 5.0]))
    return made


def test_state_starts_with_scale_1_and_an_empty_history():
    made = state(amax_history_len=16)
    assert made.scale.tolist() == [1.0] * 3
    assert made.amax_history.shape == (16, 3)
    assert not made.amax_history.any()
    assert made.scale.dtype == made.amax_history.dtype == torch.float32
    backward = state(forward=False)
    assert (backward.scale.shape, backward.amax_history.shape) == ((2,), (1024, 2))


@pytest.mark.parametrize(("forward", "dtype"), [(True, torch.float8_e4m3fn), (False, torch.float8_e5m2)])
def test_quantizers_share_the_states_memory(forward, dtype):
    made = state(forward=forward, amax_history_len=4)
    quantizers = made.make_quantizers()
    assert len(quantizers) == len(made.roles)
    made.scale.copy_(torch.arange(1.0, 1.0 + len(quantizers)))
    for slot, quantizer in enumerate(quantizers):
        assert quantizer.format.dtype is dtype
        assert quantizer.scale.item() == slot + 1.0
        quantizer.calibrate(torch.tensor([-7.0 - slot, 3.0]))
    assert made.amax_history[0].tolist() == [7.0 + slot for slot in range(len(quantizers))]
    assert not made.amax_history[1:].any()


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (4, 4, [0, 1, 2, 3]),
        (4, 7, [0, None, None, None, 1, 2, 3]),
        (7, 4, [0, 4, 5, 6]),
        (4, 2, [0, 3]),
        (4, 1, [0]),
        (1, 4, [0, None, None, None]),
        (2, 3, [0, None, 1]),
    ],
    ids=str,
)
def test_another_history_length_keeps_the_running_and_the_newest_rows(before, after, kept):
    made = with_history(before)
    rows = made.amax_history.tolist()
    made.adapt(DelayedScaling(amax_history_len=after), CPU)
    assert made.amax_history.tolist() == [[0.0] * 3 if row is None else rows[row] for row in kept]
    assert made.scale.tolist() == [2.0, 3.0, 5.0]


CHANGES = [
    ({"margin": 0}, {"margin": 2}, True, 0.25),
    ({"margin": 3}, {"margin": 0}, True, 8.0),
    ({"fp8_format": Format.HYBRID}, {"fp8_format": Format.E4M3}, True, 1.0),
    ({"fp8_format": Format.HYBRID}, {"fp8_format": Format.E4M3}, False, 448.0 / 57344.0),
    ({"fp8_format": Format.E4M3}, {"fp8_format": Format.HYBRID, "margin": 1}, False, 64.0),
    ({"amax_compute_algo": "max"}, {"amax_compute_algo": "most_recent"}, True, 1.0),
]


@pytest.mark.parametrize(("before", "after", "forward", "factor"), CHANGES, ids=str)
def test_scales_follow_margin_and_format(before, after, forward, factor):
    """As if they had been computed with the new ones from the start."""
    amax = torch.tensor([3.0, 0.7, 1e-3])[: len(FORWARD_ROLES if forward else BACKWARD_ROLES)]
    adapted, fresh = state(forward=forward, **before), state(forward=forward, **after)
    for each in (adapted, fresh):
        each.amax_history[0] = amax
        each.update()
    old = adapted.scale.clone()
    adapted.adapt(DelayedScaling(**after), CPU)
    assert torch.equal(adapted.scale, old * factor)
    assert torch.equal(adapted.scale, fresh.scale)
    assert adapted.format == fresh.format


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_scales_that_no_amax_has_moved_stay_1(rows):
    made = state(amax_history_len=rows)
    made.amax_history[0, 1] = 2.0
    made.update()
    made.amax_history[0, 2] = float("inf")
    made.update()
    made.adapt(DelayedScaling(amax_history_len=rows, margin=4), CPU)
    assert made.scale.tolist() == [1.0, 224.0 / 16.0, 1.0]


def test_an_adapted_scale_stays_finite():
    made = state(margin=4, amax_history_len=4)
    made.amax_history[0] = torch.tensor([1e-45, 1e-38, 1.0])
    made.update()
    made.adapt(DelayedScaling(margin=-4, amax_history_len=4), CPU)
    assert made.scale.tolist() == [FLOAT32_MAX, FLOAT32_MAX, 448.0 * 16.0]


def test_a_quantizer_made_before_a_change_keeps_its_scale_and_records_into_the_same_state():
    """A backward that is still to come when the recipe changes."""
    made = with_history(4)
    made.amax_history[0] = 0.0
    old = made.make_quantizers()[1]
    made.adapt(DelayedScaling(amax_history_len=4, margin=1), CPU)
    assert (old.scale.item(), made.make_quantizers()[1].scale.item()) == (3.0, 1.5)
    old.calibrate(torch.tensor([-9.0]))
    assert made.amax_history[0].tolist() == [0.0, 9.0, 0.0]


def test_changing_the_recipe_object_counts_from_the_next_forward():
    module = te.Linear(16, 16)
    chosen = DelayedScaling(amax_history_len=4)
    x = torch.full((8, 16), 2.0)
    with te.autocast(recipe=chosen):
        module(x)
        chosen.margin = 3
    assert module.fp8_meta["scaling_fwd"].scale[0].item() == 224.0
    with te.autocast(recipe=chosen):
        module(x)
        assert module.fp8_meta["scaling_fwd"].scale[0].item() == 28.0
    assert module.fp8_meta["scaling_fwd"].scale[0].item() == 28.0


def test_a_recipe_changed_between_forward_and_backward_loses_no_gradient_amax():
    module = te.Linear(16, 16)
    x = torch.ones(8, 16)
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        y = module(x)
    with te.autocast(recipe=DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")):
        module(x)
    y.backward(torch.full_like(y, 3.0))
    assert module.fp8_meta["scaling_bwd"].amax_history[-1].tolist() == [3.0, 0.0]


def test_recipes_in_turn_each_find_their_own_state():
    module = te.Linear(16, 16)
    delayed, current = DelayedScaling(amax_history_len=4), Float8CurrentScaling()
    for step in range(3):
        with te.autocast(recipe=delayed):
            module(torch.full((8, 16), 1.0 + step))
        assert isinstance(module.quantizers["scaling_fwd"][0], te.Float8Quantizer)
        with te.autocast(recipe=current):
            module(torch.full((8, 16), 100.0))
        assert isinstance(module.quantizers["scaling_fwd"][0], te.Float8CurrentScalingQuantizer)
        assert module.fp8_meta["recipe"] is current
    with te.autocast(recipe=delayed):
        module(torch.zeros(8, 16))
    assert module.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_two_modules_under_recipes_that_differ_in_algorithm_only_keep_apart():
    """Transformer Engine groups them, and the recipe entered last wins."""
    by_max, by_newest = te.Linear(16, 16), te.Linear(16, 16)
    first = DelayedScaling(amax_history_len=4, amax_compute_algo="max")
    second = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    for value in (8.0, 2.0):
        x = torch.full((8, 16), value)
        with te.autocast(recipe=first):
            by_max(x)
            with te.autocast(recipe=second):
                by_newest(x)
    assert by_max.fp8_meta["scaling_fwd"].scale[0].item() == 56.0
    assert by_newest.fp8_meta["scaling_fwd"].scale[0].item() == 224.0


# Callables


def test_callables_get_the_history_and_the_scales_and_decide():
    seen = {}

    def amax_algorithm(history: torch.Tensor) -> torch.Tensor:
        seen["history"] = history.clone()
        return history.mean(0)

    def scale_algorithm(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: Recipe) -> torch.Tensor:
        seen.update(amax=amax.clone(), scale=scale.clone(), fp8_max=fp8_max, recipe=recipe)
        return scale * 2 + amax

    made = with_history(3, amax_compute_algo=amax_algorithm, scaling_factor_compute_algo=scale_algorithm)
    before = made.amax_history.clone()
    made.update()
    assert torch.equal(seen["history"], before)
    assert torch.equal(seen["amax"], before.mean(0))
    assert seen["scale"].tolist() == [2.0, 3.0, 5.0]
    assert seen["fp8_max"] == 448.0
    assert seen["recipe"] == made.recipe
    assert made.scale.tolist() == [4.0 + 10.0, 6.0 + 11.0, 10.0 + 12.0]
    assert made.amax_history.tolist() == [[0.0] * 3, before[2].tolist(), before[0].tolist()]


def test_an_algorithm_alone_leaves_the_scale_to_the_rule():
    made = with_history(3, amax_compute_algo=lambda history: history[1], margin=1)
    made.amax_history[1] = torch.tensor([7.0, 0.0, float("inf")])
    made.update()
    assert made.scale.tolist() == [32.0, 3.0, 5.0]


def test_a_scaling_rule_alone_gets_the_named_amax():
    for algorithm, row in (("max", 2), ("most_recent", 0)):
        made = with_history(3, amax_compute_algo=algorithm, scaling_factor_compute_algo=lambda amax, *_: amax + 1)
        expected = made.amax_history[row] + 1
        made.update()
        assert torch.equal(made.scale, expected)


def test_with_callables_the_history_rolls_also_for_a_zero_amax():
    made = with_history(3, amax_compute_algo=lambda history: history.amax(0))
    made.amax_history[0] = 0.0
    before = made.amax_history.tolist()
    made.update()
    assert made.amax_history.tolist() == [[0.0] * 3, before[2], before[0]]


BAD_RESULTS = {
    "one number for all": lambda history: history.max(),
    "one per row": lambda history: history.amax(1),
    "a float": lambda _: 1.0,
    "nothing": lambda _: None,
    "two rows": lambda history: history[:2],
}


@pytest.mark.parametrize("case", BAD_RESULTS)
@pytest.mark.parametrize("field", ["amax_compute_algo", "scaling_factor_compute_algo"])
def test_a_wrong_result_of_a_callable_is_refused_and_nothing_changes(field, case):
    bad = BAD_RESULTS[case]
    function = bad if field == "amax_compute_algo" else lambda _, scale, *__: bad(scale.expand(4, 3))
    made = with_history(4, **{field: function})
    before = made.amax_history.clone(), made.scale.clone()
    with pytest.raises(ArgumentError, match=f"DelayedScaling.{field}.*one value per tensor"):
        made.update()
    assert torch.equal(made.amax_history, before[0])
    assert torch.equal(made.scale, before[1])


def test_a_callable_cannot_damage_the_state():
    def careless(history: torch.Tensor) -> torch.Tensor:
        result = history.amax(0)
        history.zero_()
        return result

    made = with_history(3, amax_compute_algo=careless)
    before = made.amax_history.clone()
    made.update()
    assert torch.equal(made.amax_history[1:], before[[2, 0]])


def test_an_error_in_a_callable_comes_out_of_autocast_and_leaves_it():
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    module = te.Linear(16, 16)
    with pytest.raises(KeyError, match="mine"), te.autocast(recipe=DelayedScaling(amax_compute_algo=fail)):
        module(torch.ones(8, 16))
    assert not te.FP8GlobalStateManager.is_fp8_enabled()


# Which state


def test_current_scaling_keeps_nothing_and_gives_each_role_its_settings():
    chosen = Float8CurrentScaling(use_power_2_scales=True)
    made = make_scaling_state(chosen, FORWARD_ROLES, forward=True, device=CPU)
    assert isinstance(made, StatelessScalingState)
    assert not hasattr(made, "update")
    assert [q.force_pow_2_scales for q in made.make_quantizers()] == [True] * 3


@dataclass(repr=False)
class Unknown(Recipe):
    """A recipe that te_hal has no state for."""

    def _validate(self) -> None:
        pass

    def element_format(self, *, forward: bool) -> ElementFormat:
        raise NotImplementedError


def test_a_recipe_without_state_is_refused_on_entry():
    with pytest.raises(UnsupportedError, match="Unknown"):
        make_scaling_state(Unknown(), FORWARD_ROLES, forward=True, device=CPU)
    with pytest.raises(UnsupportedError, match="Unknown"), te.autocast(recipe=Unknown()):
        pass
    assert not te.FP8GlobalStateManager.is_fp8_enabled()


def test_state_moves_with_the_modules_device():
    """The meta device stands for another one: shapes and places, no values."""
    made = with_history(4)
    made.adapt(DelayedScaling(amax_history_len=8), torch.device("meta"))
    assert (made.device.type, made.amax_history.device.type, made.amax_history.shape) == ("meta", "meta", (8, 3))
