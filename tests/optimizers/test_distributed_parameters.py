"""Parameters that torch's fully_shard has split over processes: no step of these optimizers takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import te_hal.modules as te
from te_hal.optimizers import FusedAdam, FusedSGD
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def sharded() -> Iterator[te.Linear]:
    """A layer whose parameters are DTensors, of a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layer = te.Linear(32, 32, params_dtype=torch.bfloat16)
    fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    yield layer
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", [FusedAdam, FusedSGD])
def test_a_sharded_parameter_is_refused_by_name_and_torchs_optimizer_steps_it(optimizer, sharded):
    with pytest.raises(ArgumentError, match=r"params: got a DTensor.*fully_shard.*torch.optim"):
        optimizer(sharded.parameters(), lr=1.0)
    plain = torch.nn.Parameter(torch.ones(3))
    made = optimizer([plain], lr=1.0)
    with pytest.raises(ArgumentError, match="DTensor"):
        made.add_param_group({"params": list(sharded.parameters())})
    assert len(made.param_groups) == 1
    before = sharded.weight.full_tensor().clone()
    sharded(torch.ones(16, 32, dtype=torch.bfloat16)).sum().backward()
    torch.optim.SGD(sharded.parameters(), lr=1.0).step()
    assert torch.equal(sharded.weight.full_tensor(), (before.float() - 16.0).bfloat16())
