"""Delayed scaling of te.Linear modules in plain Python: rules D1 to D5 of docs/numerics.md, and nothing of te_hal.

A World runs modules and their model by the same calls. The model sees operands and gradients through torch's own
hooks; ``check`` compares every history and scale.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

E4M3_MAX, E5M2_MAX, FLOAT32_MAX = 448.0, 57344.0, float(np.finfo(np.float32).max)
LENGTH = 4


def newest_two(history: list[float]) -> float:
    """An algorithm that te_hal does not have: the larger of the running and the newest past amax."""
    return max(history[0], history[-1])


def half_of_maximum(amax: float, scale: float, fp8_max: float) -> float:
    """A scaling rule that te_hal does not have."""
    return divide(fp8_max / 2, amax) if amax > 0 else scale


def divide(numerator: float, amax: float) -> float:
    """One IEEE division in fp32."""
    with np.errstate(over="ignore"):
        return float(np.float32(numerator) / np.float32(amax))


class Slot:
    """History and scale of one tensor."""

    def __init__(self, fp8_max: float, rule: Rule) -> None:
        self.fp8_max, self.rule = fp8_max, rule
        self.history, self.scale = [0.0] * rule.length, 1.0

    def record(self, tensor: torch.Tensor) -> None:
        found = [abs(value) for value in tensor.detach().float().flatten().tolist() if not math.isnan(value)]
        self.history[0] = max([self.history[0], *found])

    def update(self) -> None:
        newest = self.history[0]
        if self.rule.callables:
            self.scale = self.rule.scale(self.rule.amax(self.history), self.scale, self.fp8_max)
        elif newest == 0.0:
            return
        else:
            amax = newest if self.rule.algorithm == "most_recent" else max(self.history)
            if math.isfinite(amax):
                self.scale = min(divide(self.fp8_max * 2.0**-self.rule.margin, amax), FLOAT32_MAX)
        self.history = [*self.history[1:], newest]
        self.history[0] = 0.0


class Rule:
    """How a slot is updated."""

    def __init__(
        self, algorithm: str = "max", margin: int = 0, length: int = LENGTH, *, callables: bool = False
    ) -> None:
        self.algorithm, self.margin, self.length, self.callables = algorithm, margin, length, callables
        self.amax, self.scale = newest_two, half_of_maximum

    def recipe(self) -> recipe.DelayedScaling:
        made = recipe.DelayedScaling(margin=self.margin, amax_history_len=self.length)
        if not self.callables:
            made.amax_compute_algo = self.algorithm
            return made
        made.amax_compute_algo = lambda history: torch.maximum(history[0], history[-1])
        made.scaling_factor_compute_algo = lambda amax, scale, fp8_max, _: torch.where(
            amax > 0, torch.full_like(amax, fp8_max / 2) / amax, scale
        )
        return made


class World:
    """Modules and their model, driven by the same calls."""

    def __init__(self, rule: Rule, names: str = "abc") -> None:
        torch.manual_seed(7)
        self.rule = rule
        self.recipe = rule.recipe()
        self.modules = {name: te.Linear(16, 16, bias=False) for name in names}
        self.forward_slots = {name: [Slot(E4M3_MAX, rule) for _ in range(3)] for name in names}
        self.backward_slots = {name: [Slot(E5M2_MAX, rule) for _ in range(2)] for name in names}
        self.waiting: dict[bool, dict[str, None]] = {True: {}, False: {}}
        self.depth: list[bool] = []
        self.first_taken = False

    @contextlib.contextmanager
    def region(self, *, enabled: bool = True) -> Iterator[None]:
        outermost = enabled and not any(self.depth)
        if outermost:
            self.first_taken = False
        self.depth.append(enabled)
        try:
            with te.autocast(enabled=enabled, recipe=self.recipe):
                yield
        finally:
            self.depth.pop()
            if outermost and torch.is_grad_enabled():
                self.update(forward=True)

    def update(self, *, forward: bool) -> None:
        for name in self.waiting[forward]:
            for slot in (self.forward_slots if forward else self.backward_slots)[name]:
                slot.update()
        self.waiting[forward].clear()

    def run(self, name: str, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        module = self.modules[name]
        y = module(x, is_first_microbatch=first)
        if not (self.depth and self.depth[-1]):
            return y
        of_input, of_weight, _ = self.forward_slots[name]
        of_input.record(x)
        if first is not False:
            of_weight.record(module.weight)
        self.waiting[True][name] = None
        if y.grad_fn is not None:
            updates = not self.first_taken
            self.first_taken = True
            y.grad_fn.register_prehook(lambda grads: self.note_grad(name, grads[0]))
            y.grad_fn.register_hook(lambda *_: self.update(forward=False) if updates else None)
        return y

    def note_grad(self, name: str, grad: torch.Tensor) -> None:
        self.backward_slots[name][0].record(grad)
        self.waiting[False][name] = None

    def freeze(self, name: str) -> None:
        self.modules[name].weight.requires_grad_(False)

    def check(self) -> None:
        for name, module in self.modules.items():
            for key, slots in (("scaling_fwd", self.forward_slots[name]), ("scaling_bwd", self.backward_slots[name])):
                if key not in module.fp8_meta:
                    assert all(slot.scale == 1.0 and not any(slot.history) for slot in slots)
                    continue
                state = module.fp8_meta[key]
                assert state.amax_history.tolist() == [
                    list(row) for row in zip(*(s.history for s in slots), strict=True)
                ], f"{name}: {key}"
                assert state.scale.tolist() == [slot.scale for slot in slots], f"{name}: {key}"
