"""States that one op can roll are rolled by one call of it, per selection, device, margin and window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting_backend import Counting
from small_linear import data, linear

import te_hal
import te_hal.dispatch
import te_hal.modules as te
from te_hal import ops, recipe
from te_hal.dispatch import Backend, register_backend
from te_hal.quantization.scaling_state import FORWARD_ROLES, DelayedScalingState
from te_hal.quantization.updates import UpdateQueue
from te_hal.schema.errors import StateError

CPU = torch.device("cpu")


class Several:
    """A backend with cpu_reference's kernels and one for many histories; notes how many each call had, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[int] = []
        self.error = error
        reference = te_hal.dispatch.backend_for(CPU)
        self.one = reference.kernels["update_delayed_scale"]
        made = {"update_delayed_scale": self.update_one, "update_delayed_scales": self.update}
        kernels = {**reference.kernels, **made}
        register_backend(
            Backend(name="several", kernels=kernels, serves=frozenset({"cpu"}), supports=reference.supports)
        )

    def update_one(
        self,
        amax_history: Any,
        scale: Any,
        *,
        reduced_amax: Any = None,
        fp8_max: float,
        margin: int = 0,
        amax_compute_algo: str = "max",
    ) -> None:
        settings = {"margin": margin, "amax_compute_algo": amax_compute_algo}
        assert reduced_amax is None
        self.update((amax_history,), (scale,), fp8_maxima=(fp8_max,), **settings)

    def update(
        self,
        amax_histories: Any,
        scales: Any,
        *,
        reduced_amaxes: Any = None,
        fp8_maxima: Any,
        margin: int = 0,
        amax_compute_algo: str = "max",
    ) -> None:
        self.calls.append(len(scales))
        if self.error is not None:
            raise self.error
        assert reduced_amaxes is None
        settings = {"margin": margin, "amax_compute_algo": amax_compute_algo}
        for history, scale, fp8_max in zip(amax_histories, scales, fp8_maxima, strict=True):
            self.one(history, scale, fp8_max=fp8_max, **settings)


def state(**fields: Any) -> DelayedScalingState:
    """A state that has recorded an amax of 2 everywhere."""
    made = DelayedScalingState(recipe.DelayedScaling(**fields), FORWARD_ROLES, forward=True, device=CPU)
    made.amax_history[0] = 2.0
    return made


def queue_of(*states: DelayedScalingState) -> UpdateQueue:
    queue = UpdateQueue()
    for each in states:
        queue.add(each, forward=True)
    return queue


def test_a_model_is_updated_by_one_call_per_direction_with_the_values_of_one_by_one() -> None:
    several = Several()
    torch.manual_seed(0)
    model = torch.nn.Sequential(linear(), linear(), linear())
    torch.manual_seed(0)
    twin = torch.nn.Sequential(linear(), linear(), linear())
    for step in range(3):
        x = data() * (1 + step)
        for backend, layers in (("several", model), ("cpu_reference", twin)):
            with te_hal.use_backend(backend), te.autocast():
                y = layers(x)
            y.square().sum().backward()
    assert several.calls == [3] * 6
    for own, other in zip(model, twin, strict=True):
        for direction in ("scaling_fwd", "scaling_bwd"):
            assert torch.equal(own.fp8_meta[direction].scale, other.fp8_meta[direction].scale)
            assert torch.equal(own.fp8_meta[direction].amax_history, other.fp8_meta[direction].amax_history)


def test_margins_and_windows_go_apart_and_formats_and_lengths_together() -> None:
    several = Several()
    states = [
        state(),
        state(margin=1),
        state(amax_history_len=3),
        state(fp8_format=recipe.Format.E4M3),
        state(amax_compute_algo="most_recent"),
        state(margin=1),
    ]
    with te_hal.use_backend("several"):
        queue_of(*states).update(forward=True)
    assert several.calls == [3, 2, 1]
    assert [each.scale[0].item() for each in states] == [224.0, 112.0, 224.0, 224.0, 224.0, 112.0]


def test_each_selection_rolls_its_own() -> None:
    several, counting = Several(), Counting("counting")
    queue, states = UpdateQueue(), [state() for _ in range(4)]
    for backend, part in (("several", states[:2]), ("counting", states[2:])):
        with te_hal.use_backend(backend):
            for each in part:
                queue.add(each, forward=True)
    queue.update(forward=True)
    assert several.calls == [2]
    assert counting.count("update_delayed_scale") == 2


def test_a_users_callable_rolls_after_those_before_it_and_if_it_fails_those_behind_still_wait() -> None:
    several = Several()

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise KeyError

    states = [state(), state(amax_compute_algo=refuse), state()]
    with te_hal.use_backend("several"):
        queue = queue_of(*states)
    with pytest.raises(KeyError):
        queue.update(forward=True)
    assert several.calls == [1]
    assert [each.scale[0].item() for each in states] == [224.0, 1.0, 1.0]
    queue.update(forward=True)
    assert [each.scale[0].item() for each in states] == [224.0, 1.0, 224.0]


def test_groups_behind_one_that_fails_still_wait() -> None:
    several = Several(error=KeyError("no"))
    states = [state(), state(margin=1)]
    with te_hal.use_backend("several"):
        queue = queue_of(*states)
    with pytest.raises(KeyError):
        queue.update(forward=True)
    several.error = None
    queue.update(forward=True)
    assert several.calls == [1, 1]
    assert [each.scale[0].item() for each in states] == [1.0, 112.0]


def test_a_state_whose_tensors_were_replaced_by_wrong_ones_is_refused_before_anything_is_written() -> None:
    states = [state(), state()]
    states[1].scale = torch.ones(2)
    with pytest.raises(StateError, match=r"scale of torch.float32, \(2,\)"):
        queue_of(*states).update(forward=True)
    assert states[0].scale[0].item() == 1.0
    assert ops.amax(states[0].amax_history).item() == 2.0
