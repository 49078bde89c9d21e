"""Detection of activation recompute (torch.utils.checkpoint), which FP8 modules do not support yet.

A recomputed forward runs inside the backward pass: it would record amax a second time, and, as torch's checkpoint
does not restore te.autocast, it could silently run unquantized. A forward that a gradient hook runs looks the same from
inside a module, so it is refused too; the message names both.
"""

from __future__ import annotations

import torch

from te_hal.schema.errors import UnsupportedError

_NO_GRAPH_TASK = -1


def refuse_recompute(module: str, *, fp8: bool) -> None:
    """Refuse an FP8 forward inside a backward pass.

    Args:
        module: module class and name, for the message.
        fp8: whether the module runs in FP8 now, or did in its last forward outside a backward.

    Raises:
        UnsupportedError: see above.
    """
    if fp8 and torch._C._current_graph_task_id() != _NO_GRAPH_TASK:  # noqa: SLF001 - torch has no public question
        raise UnsupportedError(
            module,
            got="an FP8 forward inside a backward pass: activation recompute (torch.utils.checkpoint), or a hook that "
            "runs the module",
            accepted="a forward outside of it",
            todo="leave FP8 modules out of the checkpointed function (recompute over them is not built yet); "
            "run what a hook needs after the backward",
        )
