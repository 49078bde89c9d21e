"""Devices: how a backend's calls find the device and the stream that they work on, and what a device needs first."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from te_hal.ffi.native import Native

_USE_THE_INSTRUCTION = 1


def no_stream(device: torch.device) -> int:  # noqa: ARG001 - the signature of a backend's own
    """The stream of a library without streams."""
    return 0


@dataclass(frozen=True)
class Devices:
    """What a backend knows about its devices.

    Attributes:
        type: device type of its tensors.
        stream: the current stream of a device, as an integer.
        current: index of the device that the calling thread is on; None where there is only one and no runtime.
        enter: makes a device the calling thread's inside a ``with`` block.
    """

    type: str
    stream: Callable[[torch.device], int] = no_stream
    current: Callable[[], int] | None = None
    enter: Callable[[torch.device], AbstractContextManager[object]] = nullcontext


HOST = Devices("cpu")


class Preparation:
    """Which devices are ready for kernels. A device is prepared by the first call on it, in whichever thread."""

    def __init__(self) -> None:
        self.ready: set[int] = set()
        self._lock = threading.Lock()

    def prepare(self, native: Native, device: torch.device) -> None:
        """Let casts use the device's FP8 instruction, if it has one that agrees with the software encoder.

        Tried on the bit patterns around every rounding boundary; waits for the device. The calling thread is on it.
        """
        with self._lock:
            if device.index in self.ready:
                return
            mismatches = native.ffi.new("int64_t *")
            status = native.lib.api_select_fp8_encoder(
                native.library.api, _USE_THE_INSTRUCTION, mismatches, native.stream(device)
            )
            if status != native.lib.TE_HAL_UNSUPPORTED:
                native.check(status, "select_fp8_encoder")
                if mismatches[0]:
                    warnings.warn(
                        f"backend {native.backend}: the FP8 instruction of {device} differs from the rules in "
                        f"{mismatches[0]} bit patterns; the software encoder is used instead",
                        stacklevel=2,
                    )
            self.ready.add(device.index)
