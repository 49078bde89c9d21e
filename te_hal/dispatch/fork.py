"""The fork rule: a device backend that was in use before a fork is refused in the child.

Device runtimes do not survive a fork, and what they do afterwards ranges from an error far away to a hang.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    import torch

#: Devices whose memory and code are the process's own.
_SURVIVES = frozenset({"cpu", "meta"})


class _Uses:
    def __init__(self) -> None:
        self.here: set[tuple[str, str]] = set()
        self.before_fork: frozenset[tuple[str, str]] = frozenset()

    def forked(self) -> None:
        self.before_fork = frozenset(self.here)


_USES = _Uses()
os.register_at_fork(after_in_child=_USES.forked)


def note_use(backend: str, device: torch.device) -> None:
    """Record that a backend runs on a device in this process; refuse what an ancestor had initialised.

    Raises:
        StateError: this process was forked from one in which the backend had used such a device.
    """
    if device.type in _SURVIVES:
        return
    use = (backend, device.type)
    if use in _USES.before_fork:
        raise StateError(
            f"backend {backend}",
            got=f"a call on {device} in a forked process, whose parent had already used it",
            accepted="use in the process that initialised the device",
            todo="start workers with the 'spawn' method, or fork before the first op on the device",
        )
    _USES.here.add(use)
