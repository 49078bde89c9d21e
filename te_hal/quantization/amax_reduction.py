"""Reduction of amax over processes: with one process there is nothing to do, several are refused for now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed

from te_hal.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_single_process(where: str, group: ProcessGroup | None) -> None:
    """Refuse a reduction that would span several processes.

    Args:
        where: who asks, for the message.
        group: the group; None means all processes, as in Transformer Engine.

    Raises:
        UnsupportedError: torch.distributed runs with more than one process in the group.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    size = torch.distributed.get_world_size(group)
    if size > 1:
        raise UnsupportedError(
            where,
            got=f"a group of {size} processes",
            accepted="one process, or a recipe with reduce_amax=False",
            todo="amax reduction over processes is not built yet",
        )
