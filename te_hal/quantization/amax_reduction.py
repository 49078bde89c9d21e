"""Reduction of amax over processes: with one process there is nothing to do, several are refused for now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed

from te_hal.schema.errors import ArgumentTypeError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: Whether this torch was built with torch.distributed; where not, the module lacks its other functions.
_HAS_PROCESSES = torch.distributed.is_available()


def check_group(where: str, group: object) -> None:
    """Refuse what is neither None nor a process group, also where nobody would ask it anything.

    Raises:
        ArgumentTypeError: see above.
    """
    if group is None or (_HAS_PROCESSES and isinstance(group, torch.distributed.ProcessGroup)):
        return
    raise ArgumentTypeError(
        where,
        got=f"a {type(group).__name__}",
        accepted="a torch.distributed.ProcessGroup, or None",
        todo="pass what torch.distributed.new_group returns",
    )


def check_single_process(where: str, group: ProcessGroup | None) -> None:
    """Refuse a reduction that would span several processes.

    Args:
        where: who asks, for the message.
        group: the group; None means all processes, as in Transformer Engine.

    Raises:
        UnsupportedError: torch.distributed runs with more than one process in the group.
    """
    if not (_HAS_PROCESSES and torch.distributed.is_initialized()):
        return
    size = torch.distributed.get_world_size(group)
    if size > 1:
        raise UnsupportedError(
            where,
            got=f"a group of {size} processes",
            accepted="one process, or a recipe with reduce_amax=False",
            todo="amax reduction over processes is not built yet",
        )
