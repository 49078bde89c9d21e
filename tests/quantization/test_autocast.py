"""autocast: nesting, exceptions, reuse, recipes side by side."""

from __future__ import annotations

import contextlib

import pytest
import torch
from small_linear import RECIPES, data, high_precision, linear, newest, running

import te_hal.modules as te
from te_hal.recipe import DelayedScaling, Float8CurrentScaling, Format
from te_hal.schema.errors import ArgumentTypeError, StateError, UnsupportedError

MANAGER = te.FP8GlobalStateManager


def test_outside_of_any_autocast_modules_run_in_high_precision():
    module, x = linear(), data()
    assert not MANAGER.is_fp8_enabled()
    assert torch.equal(module(x), high_precision(module, x))
    assert not module.fp8_initialized


@pytest.mark.parametrize("name", RECIPES)
def test_inside_modules_quantize(name):
    module, x, chosen = linear(), data(), RECIPES[name]()
    with te.autocast(recipe=chosen):
        assert MANAGER.is_fp8_enabled()
        assert not MANAGER.is_fp8_calibration()
        assert MANAGER.get_fp8_recipe() is chosen
        y = module(x)
    assert module.fp8
    assert not torch.equal(y, high_precision(module, x))
    assert (y - high_precision(module, x)).norm() < 0.2 * high_precision(module, x).norm()


def test_without_a_recipe_it_is_delayed_scaling_with_defaults():
    assert te.get_default_recipe() == DelayedScaling()
    module = linear()
    for _ in range(2):
        with te.autocast():
            assert MANAGER.get_fp8_recipe() == DelayedScaling()
            module(data())
    assert module.fp8_meta["scaling_fwd"].amax_history[-2:, 0].gt(0).all()
    with te.autocast(enabled=False):
        assert MANAGER.get_fp8_recipe() == DelayedScaling()


def test_entering_gives_nothing_to_hold():
    with te.autocast() as held:
        assert held is None


@pytest.mark.parametrize("name", RECIPES)
def test_off_inside_on_is_exactly_high_precision(name):
    first, second, x = linear(), linear(), data()
    with te.autocast(recipe=RECIPES[name]()):
        a = first(x)
        with te.autocast(enabled=False):
            b = second(x)
            assert not MANAGER.is_fp8_enabled()
        again = first(x)
    assert torch.equal(b, high_precision(second, x))
    assert not second.fp8_initialized
    assert torch.equal(a, again)
    assert not torch.equal(a, high_precision(first, x))


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_module_switches_back_and_forth(name):
    module, x = linear(), data()
    with te.autocast(recipe=RECIPES[name]()):
        on = module(x)
        with te.autocast(enabled=False):
            off = module(x)
        assert torch.equal(module(x), on)
    assert torch.equal(off, high_precision(module, x))
    assert torch.equal(module(x), high_precision(module, x))
    assert not module.fp8


def test_nesting_restores_what_was_in_force():
    outer, inner = DelayedScaling(), Float8CurrentScaling()
    with te.autocast(recipe=outer):
        with te.autocast(recipe=inner):
            assert MANAGER.get_fp8_recipe() is inner
            with te.autocast(enabled=False, calibrating=True, recipe=outer):
                assert MANAGER.is_fp8_calibration()
                assert not MANAGER.is_fp8_enabled()
            assert MANAGER.get_fp8_recipe() is inner
        assert MANAGER.get_fp8_recipe() is outer
        assert MANAGER.is_fp8_enabled()
    assert not MANAGER.is_fp8_enabled()


def test_an_exception_leaves_what_was_in_force_before():
    outer = Float8CurrentScaling()
    with te.autocast(recipe=outer):
        with contextlib.suppress(KeyError), te.autocast(recipe=DelayedScaling()), te.autocast(enabled=False):
            raise KeyError
        assert MANAGER.get_fp8_recipe() is outer
        assert MANAGER.is_fp8_enabled()
    with contextlib.suppress(KeyError), te.autocast():
        raise KeyError
    assert not MANAGER.is_fp8_enabled()


def test_an_exception_still_takes_up_what_was_recorded():
    module = linear()
    with contextlib.suppress(KeyError), te.autocast(recipe=RECIPES["delayed"]()):
        module(torch.full((16, 32), 4.0))
        raise KeyError
    assert newest(module)[0] == 4.0


def test_one_object_is_used_again_after_it_was_left():
    autocast, module = te.autocast(recipe=RECIPES["delayed"]()), linear()
    for value in (1.0, 2.0):
        with autocast:
            module(torch.full((16, 32), value))
    assert module.fp8_meta["scaling_fwd"].amax_history[-2:, 0].tolist() == [1.0, 2.0]
    with contextlib.suppress(KeyError), autocast:
        raise KeyError
    with autocast:
        assert MANAGER.is_fp8_enabled()


def test_one_object_twice_at_once_is_refused_and_the_outer_use_goes_on():
    autocast = te.autocast(recipe=Float8CurrentScaling())
    with autocast:
        with pytest.raises(RuntimeError, match="autocast: got an object that is already entered"), autocast:
            pass
        assert MANAGER.is_fp8_enabled()
        with pytest.raises(StateError, match="make a new"):
            autocast.__enter__()
    assert not MANAGER.is_fp8_enabled()


def test_blocks_left_out_of_order_take_their_own_frame_away():
    """As generators do that hold an autocast open."""

    def holding(recipe: object) -> object:
        with te.autocast(recipe=recipe):
            yield

    first, second = Float8CurrentScaling(), DelayedScaling()
    one, two = holding(first), holding(second)
    next(one)
    next(two)
    one.close()
    assert MANAGER.get_fp8_recipe() is second
    assert MANAGER.is_fp8_enabled()
    two.close()
    assert not MANAGER.is_fp8_enabled()


def test_reset_leaves_every_block_and_forgets_what_waits():
    module = linear()
    with te.autocast(recipe=RECIPES["delayed"]()):
        module(torch.full((16, 32), 3.0))
        with te.autocast(enabled=False):
            MANAGER.reset()
            assert not MANAGER.is_fp8_enabled()
    assert not MANAGER.is_fp8_enabled()
    assert (running(module)[0], newest(module)[0]) == (3.0, 0.0)


def test_an_update_can_be_asked_for():
    module = linear()
    with te.autocast(recipe=RECIPES["delayed"]()):
        module(torch.full((16, 32), 3.0))
        MANAGER.reduce_and_update_fp8_tensors(forward=True)
        assert (running(module)[0], newest(module)[0]) == (0.0, 3.0)
    assert newest(module)[0] == 3.0


def test_the_older_spelling_means_the_same():
    chosen = DelayedScaling(amax_history_len=4)
    for made in (te.fp8_autocast(True, False, chosen, None), te.fp8_autocast(enabled=True, fp8_recipe=chosen)):
        with made:
            assert MANAGER.get_fp8_recipe() is chosen
            assert MANAGER.is_fp8_enabled()
    with te.fp8_autocast(enabled=False, calibrating=True):
        assert MANAGER.is_fp8_calibration()


WRONG = [DelayedScaling, "delayed", Format.HYBRID, 1]


@pytest.mark.parametrize("recipe", WRONG, ids=str)
def test_what_is_no_recipe_is_refused(recipe):
    with pytest.raises(ArgumentTypeError, match=r"autocast: recipe: got a \w+; accepted: .*te_hal.recipe"):
        te.autocast(recipe=recipe)
    with pytest.raises(TypeError, match="autocast: recipe"):
        te.fp8_autocast(fp8_recipe=recipe)


def test_graph_capture_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="autocast: _graph"):
        te.autocast(_graph=True)


def test_recipes_in_one_region_each_follow_their_own_rule():
    recipes = [
        DelayedScaling(amax_history_len=4, amax_compute_algo="max"),
        DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
        DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=2),
        DelayedScaling(amax_history_len=2, amax_compute_algo="max", fp8_format=Format.E4M3),
        Float8CurrentScaling(),
    ]
    modules = [linear() for _ in recipes]
    for value in (8.0, 4.0, 2.0):
        total = torch.zeros(())
        with te.autocast(recipe=recipes[0]):
            for module, chosen in zip(modules, recipes, strict=True):
                with te.autocast(recipe=chosen):
                    total = total + (module(torch.full((16, 32), value)) * value).sum()
        total.backward()
    forward = [m.fp8_meta["scaling_fwd"].scale[0].item() for m in modules[:4]]
    backward = [m.fp8_meta["scaling_bwd"].scale[0].item() for m in modules[:4]]
    assert forward == [448 / 8, 448 / 2, 448 / 2 / 4, 448 / 4]
    assert backward == [57344 / 8, 57344 / 2, 57344 / 2 / 4, 448 / 4]
    assert isinstance(modules[4].quantizers["scaling_fwd"][0], te.Float8CurrentScalingQuantizer)


def test_recipes_that_differ_in_the_algorithm_only_share_no_state_whatever_the_order():
    """Transformer Engine keys its buffers by the printed recipe, which leaves the algorithm out."""
    algorithms = ("max", "most_recent")
    modules = {name: linear() for name in algorithms}
    for value in (8.0, 2.0):
        for name in algorithms:
            with te.autocast(recipe=DelayedScaling(amax_history_len=4, amax_compute_algo=name)):
                modules[name](torch.full((16, 32), value))
    scales = {name: modules[name].fp8_meta["scaling_fwd"].scale[0].item() for name in algorithms}
    assert scales == {"max": 56.0, "most_recent": 224.0}


@pytest.mark.parametrize("name", ["enabled", "calibrating", "_graph"])
@pytest.mark.parametrize("value", ["false", 1, None], ids=repr)
def test_a_flag_that_is_no_bool_is_refused(name, value):
    with pytest.raises(ArgumentTypeError, match=f"autocast: {name}: got {value!r}; accepted: True, False"):
        te.autocast(**{name: value})


def test_a_recipe_in_the_place_of_a_flag_is_told_where_it_belongs():
    with pytest.raises(ArgumentTypeError, match=r"enabled: got a recipe, Float8CurrentScaling; .* as recipe="):
        te.autocast(Float8CurrentScaling())
