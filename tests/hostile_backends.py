"""Modules of backends that do harm while they are loaded, or lie; by name, for the kit's workers and for plugins."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from faulty_backends import faulty

if TYPE_CHECKING:
    from te_hal.dispatch import Backend


def crashes() -> Backend:
    """Ends the process while it is made."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def hangs() -> Backend:
    """Is never made."""
    time.sleep(600)
    raise AssertionError


def leaves() -> Backend:
    """Calls sys.exit, as libraries do that find no device."""
    sys.exit(3)


def raises() -> Backend:
    """Fails to be made."""
    message = "libchip.so.1 is missing"
    raise OSError(message)


def lies_about_sizes() -> Backend:
    """The result of a dequantize is a row short."""
    return faulty("dequantize", lambda right: lambda *operands, **flags: right(*operands, **flags)[:-1])


def lies_about_dtypes() -> Backend:
    """The rstd of a norm is bf16."""

    def change(right):
        def rmsnorm_fwd(*operands, **flags):
            output, rstd = right(*operands, **flags)
            return output, rstd.bfloat16()

        return rmsnorm_fwd

    return faulty("rmsnorm_fwd", change)


def gives_one_result() -> Backend:
    """A norm gives its output alone."""
    return faulty("rmsnorm_fwd", lambda right: lambda *operands, **flags: right(*operands, **flags)[0])


def gives_nothing() -> Backend:
    """A product is None."""
    return faulty("gemm", lambda right: lambda *operands, **flags: None)  # noqa: ARG005


def gives_text() -> Backend:
    """A product is the text of one."""
    return faulty("gemm", lambda right: lambda *operands, **flags: "a product")  # noqa: ARG005
