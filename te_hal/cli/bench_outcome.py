"""What became of a call that was not timed: the backend declined it, or it failed."""

from __future__ import annotations

import torch

from te_hal.schema.errors import UnsupportedError

#: The two words of a record.
REFUSED, FAILED = "refused", "failed"


def outcome_of(error: BaseException) -> tuple[str, str]:
    """:data:`REFUSED`, where a backend says no or the device has no memory, else :data:`FAILED`; and the reason.

    Args:
        error: one of te_hal.cli.failure.STEP_FAILURES.
    """
    if isinstance(error, UnsupportedError):
        return REFUSED, str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return REFUSED, "the device has not enough memory for its operands"
    return FAILED, f"{type(error).__name__}: {error}"
