"""amax_reduction_group: one process has nothing to do, several are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import te_hal.modules as te
from te_hal.recipe import DelayedScaling, Float8CurrentScaling
from te_hal.schema.errors import ArgumentTypeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def one_process() -> Iterator[None]:
    """A real process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_processes() -> Iterator[None]:
    """A process group that says it has two members, and never communicates."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def step(**arguments: object) -> te.Linear:
    torch.manual_seed(0)
    module = te.Linear(16, 16)
    with te.autocast(**arguments):
        module(torch.randn(8, 16)).sum().backward()
    return module


@pytest.mark.usefixtures("one_process")
def test_one_process_does_nothing():
    reduced = step(recipe=DelayedScaling(), amax_reduction_group=dist.group.WORLD)
    alone = step(recipe=DelayedScaling(reduce_amax=False))
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(reduced.fp8_meta[key].amax_history, alone.fp8_meta[key].amax_history)
        assert torch.equal(reduced.fp8_meta[key].scale, alone.fp8_meta[key].scale)
    assert torch.equal(reduced.weight.grad, alone.weight.grad)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("group", ["default", "world"])
def test_several_processes_are_refused_by_name_before_anything_changes(group):
    """No group means all processes."""
    groups = {} if group == "default" else {"amax_reduction_group": dist.group.WORLD}
    autocast = te.autocast(recipe=DelayedScaling(), **groups)
    with pytest.raises(NotImplementedError, match="amax_reduction_group: got a group of 2 processes"):
        autocast.__enter__()
    assert not te.FP8GlobalStateManager.is_fp8_enabled()
    with pytest.raises(UnsupportedError, match="reduce_amax=False"), autocast:
        pass
    with pytest.raises(UnsupportedError, match="amax_reduction_group"), te.autocast(enabled=False, calibrating=True):
        pass


@pytest.mark.usefixtures("two_processes")
def test_what_needs_no_reduction_runs_in_several_processes():
    step(recipe=DelayedScaling(reduce_amax=False))
    step(recipe=DelayedScaling(reduce_amax=False), amax_reduction_group=dist.group.WORLD)
    step(recipe=Float8CurrentScaling())
    step(enabled=False, recipe=DelayedScaling())


@pytest.mark.usefixtures("two_processes")
def test_a_group_of_this_process_alone_is_one_process():
    step(recipe=DelayedScaling(), amax_reduction_group=dist.new_group([0]))


@pytest.mark.usefixtures("two_processes")
def test_a_quantizer_refuses_a_reduction_over_several_processes():
    with pytest.raises(UnsupportedError, match="with_amax_reduction: got a group of 2 processes"):
        te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True)
    te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, amax_reduction_group=dist.group.WORLD)


@pytest.mark.parametrize("group", ["dp", 0, [0, 1]], ids=str)
def test_what_is_no_process_group_is_refused(group):
    with pytest.raises(ArgumentTypeError, match=r"amax_reduction_group: got a \w+; accepted: a .*ProcessGroup"):
        te.autocast(amax_reduction_group=group)
    with pytest.raises(ArgumentTypeError, match="amax_reduction_group"):
        te.fp8_autocast(fp8_group=group)
