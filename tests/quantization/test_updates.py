"""When histories roll and what they become: te.Linear against a model of the rules in plain Python."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import pytest
import torch
from delayed_scaling_model import Rule, World

if TYPE_CHECKING:
    from collections.abc import Callable


def data(scale: float = 1.0, *, grad: bool = False) -> torch.Tensor:
    return (torch.randn(8, 16) * scale).requires_grad_(grad)


def several_steps(world: World) -> None:
    for step in range(7):
        with world.region():
            y = world.run("b", world.run("a", data(2.0 ** (3 - step))))
        y.square().sum().backward()
        world.check()


def first_weight_is_frozen(world: World) -> None:
    world.freeze("a")
    for _ in range(3):
        with world.region():
            y = world.run("b", world.run("a", data(grad=True)))
        y.square().sum().backward()
        world.check()


def first_module_has_no_gradient_at_all(world: World) -> None:
    world.freeze("a")
    for _ in range(3):
        with world.region():
            y = world.run("c", world.run("b", world.run("a", data())))
        y.square().sum().backward()
        world.check()


def first_module_runs_without_gradients(world: World) -> None:
    for _ in range(3):
        with world.region():
            with torch.no_grad():
                x = world.run("a", data())
            y = world.run("b", x)
        y.square().sum().backward()
        world.check()


def the_whole_region_runs_without_gradients(world: World) -> None:
    with torch.no_grad(), world.region():
        world.run("a", data(100.0))
    world.check()
    with world.region():
        y = world.run("a", data())
    world.check()
    y.sum().backward()


def two_regions_before_two_backwards(world: World) -> None:
    for _ in range(2):
        with world.region():
            first = world.run("b", world.run("a", data(3.0)))
        with world.region():
            second = world.run("b", world.run("a", data(0.1)))
        second.square().sum().backward()
        world.check()
        first.square().sum().backward()
        world.check()


def backward_twice(world: World) -> None:
    with world.region():
        y = world.run("b", world.run("a", data()))
    y.square().sum().backward(retain_graph=True)
    world.check()
    (5 * y).sum().backward()


def gradients_accumulate_over_regions(world: World) -> None:
    for step in range(4):
        with world.region():
            y = world.run("a", data(1.0 + step))
        (y.square().sum() / 4).backward()
        world.check()


def one_region_holds_several_microbatches(world: World) -> None:
    for _ in range(2):
        with world.region():
            ys = [world.run("a", data(scale)) for scale in (1.0, 7.0, 0.01)]
        world.check()
        for y in ys:
            y.square().sum().backward()
            world.check()


def kept_weights(world: World) -> None:
    for _ in range(2):
        for first in (True, False, False):
            with world.region():
                y = world.run("a", data(), first)
            y.square().sum().backward()
            world.check()


def a_module_is_called_twice(world: World) -> None:
    for _ in range(2):
        with world.region():
            y = world.run("a", world.run("a", data(4.0)))
        y.square().sum().backward()
        world.check()


def an_error_between_forward_and_backward(world: World) -> None:
    with contextlib.suppress(KeyError), world.region():
        world.run("a", data(9.0))
        raise KeyError
    world.check()
    with world.region():
        y = world.run("a", data())
    y.square().sum().backward()


def an_error_in_the_backward(world: World) -> None:
    with world.region():
        y = world.run("b", world.run("a", data()))

    def fail(_: torch.Tensor) -> None:
        raise KeyError

    z = y * 2
    y.register_hook(fail)
    with contextlib.suppress(KeyError):
        z.sum().backward()
    world.check()
    with world.region():
        y = world.run("b", world.run("a", data()))
    y.square().sum().backward()


def off_inside_on(world: World) -> None:
    for _ in range(2):
        with world.region():
            x = world.run("a", data())
            with world.region(enabled=False):
                x = world.run("b", x)
            y = world.run("c", x)
        y.square().sum().backward()
        world.check()


def on_inside_off(world: World) -> None:
    for _ in range(2):
        with world.region(enabled=False):
            x = world.run("a", data())
            with world.region():
                x = world.run("b", x)
            world.check()
            with world.region():
                y = world.run("c", x)
            world.check()
        y.square().sum().backward()
        world.check()


def on_inside_on(world: World) -> None:
    for _ in range(2):
        with world.region():
            x = world.run("a", data())
            with world.region():
                x = world.run("b", x)
            world.check()
            y = world.run("c", x)
        y.square().sum().backward()
        world.check()


def the_first_modules_output_is_not_used(world: World) -> None:
    for _ in range(2):
        with world.region():
            world.run("a", data(grad=True))
            y = world.run("b", data(grad=True))
        y.square().sum().backward()
        world.check()
    with world.region():
        y = world.run("b", data(grad=True))
    y.square().sum().backward()


def branches(world: World) -> None:
    for _ in range(2):
        with world.region():
            x = world.run("a", data(grad=True))
            y = world.run("b", x) + world.run("c", x)
        y.square().sum().backward()
        world.check()


def zero_and_special_values(world: World) -> None:
    for value in (0.0, -3.0, float("nan"), 2.0, float("inf"), 0.5, 0.25, -0.0, 0.125, 1e-40, 4.0):
        x = data()
        x[3] = value
        for each in (x, torch.full((8, 16), value)):
            with world.region():
                world.run("a", each)
            world.check()


SCENARIOS: list[Callable[[World], None]] = [
    several_steps,
    first_weight_is_frozen,
    first_module_has_no_gradient_at_all,
    first_module_runs_without_gradients,
    the_whole_region_runs_without_gradients,
    two_regions_before_two_backwards,
    backward_twice,
    gradients_accumulate_over_regions,
    one_region_holds_several_microbatches,
    kept_weights,
    a_module_is_called_twice,
    an_error_between_forward_and_backward,
    an_error_in_the_backward,
    off_inside_on,
    on_inside_off,
    on_inside_on,
    the_first_modules_output_is_not_used,
    branches,
    zero_and_special_values,
]

RULES = {
    "max": Rule("max"),
    "most_recent": Rule("most_recent"),
    "margin": Rule("max", margin=3),
    "one_row": Rule("max", length=1),
    "callables": Rule(callables=True),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("rule", RULES)
def test_states_follow_the_model(rule, scenario):
    world = World(RULES[rule])
    scenario(world)
    world.check()


@pytest.mark.parametrize("seed", range(12))
def test_states_follow_the_model_through_random_programs(seed):
    chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
    world = World(chance.choice(list(RULES.values())))
    pending: list[torch.Tensor] = []
    for _ in range(25):
        choice = chance.random()
        if choice < 0.6:
            with world.region(enabled=chance.random() < 0.9), torch.set_grad_enabled(chance.random() < 0.8):
                x = data(4.0 ** chance.randint(-3, 3), grad=chance.random() < 0.5)
                for name in chance.choices("abc", k=chance.randint(1, 3)):
                    x = world.run(name, x)
            if x.requires_grad:
                pending.append(x)
        elif choice < 0.9 and pending:
            pending.pop(chance.randrange(len(pending))).square().sum().backward()
        else:
            world.modules[chance.choice("abc")].weight.requires_grad_(chance.random() < 0.7)
        world.check()
