"""A backend that ends its process, hangs or says which it is, by the size of its input; for the kit's workers."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from faulty_backends import faulty

if TYPE_CHECKING:
    from te_hal.dispatch import Backend


def create_backend() -> Backend:
    """The amax of a vector of 1 element kills the process, that of 129 never comes, rows far apart are refused."""

    def change(right):
        def amax(input, *, out=None):
            if input.numel() == 1 and input.dim() == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            if input.numel() == 129:
                time.sleep(600)
            if input.stride(0) > 2**20:
                message = f"in process {os.getpid()}"
                raise RuntimeError(message)
            return right(input, out=out)

        return amax

    return faulty("amax", change)
