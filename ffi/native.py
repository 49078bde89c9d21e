"""Native: a kernel library as one backend uses it. What the marshalling is given first."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from te_hal.ffi.allocation import empty_for
from te_hal.ffi.binding import binding
from te_hal.ffi.locations import find_library
from te_hal.schema.errors import BackendUnavailableError, StateError
from te_hal.schema.support import SUPPORTED, Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from te_hal.ffi.library import Library

    Kernel = Callable[..., Any]


def no_stream(device: torch.device) -> int:  # noqa: ARG001 - the signature of a backend's own
    """The stream of a library without streams."""
    return 0


class Native:
    """A kernel library with what its backend adds: a name, the stream to work on, and the device to be on.

    The library is looked for and opened when it is first used, not before.

    Args:
        backend: name of the backend, for messages.
        target: of the library: "musa", "cuda" or "host".
        device_type: of its tensors.
        stream: the current stream of a device, as an integer.
        current_device: index of the device that the calling thread is on; None where there is only one.
        on_device: makes a device the calling thread's for a while.

    Attributes:
        empty: makes a contiguous tensor from shape, dtype and device.
        lib: the trampolines, and ``ffi`` their tool for structs.
        library: the open library; its ``api`` is their first argument.
    """

    ffi: Any
    lib: Any
    library: Library

    def __init__(
        self,
        backend: str,
        target: str,
        device_type: str,
        *,
        stream: Callable[[torch.device], int] = no_stream,
        current_device: Callable[[], int] | None = None,
        on_device: Callable[[torch.device], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.backend = backend
        self.target = target
        self.empty = empty_for(device_type)
        self.stream = stream
        self._current_device = current_device
        self._on_device = on_device
        self._ones: dict[torch.device, torch.Tensor] = {}

    def __getattr__(self, name: str) -> object:
        """The first use of ``library`` and its companions; from then on they are plain attributes."""
        if name not in {"ffi", "lib", "library"}:
            raise AttributeError(name)
        lib, ffi = binding()
        self.library = find_library(self.target)
        self.lib, self.ffi = lib, ffi
        return self.__dict__[name]

    def one(self, device: torch.device) -> torch.Tensor:
        """An fp32 1 on a device, made once. Not to be written to."""
        known = self._ones.get(device)
        if known is None:
            known = self._ones[device] = torch.ones(1, dtype=torch.float32, device=device)
        return known

    def bind(self, function: Kernel) -> Kernel:
        """A kernel: ``function`` with this object as its first argument, run on the device of its first operand."""
        bound = functools.partial(function, self)
        if self._current_device is None or self._on_device is None:
            return bound
        current_device, on_device = self._current_device, self._on_device

        @functools.wraps(bound)
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on what the op's schema says
            device = (args[0] if args else next(iter(kwargs.values()))).device
            if device.index == current_device():
                return bound(*args, **kwargs)
            with on_device(device):
                return bound(*args, **kwargs)

        return run

    def check(self, status: int, op: str) -> None:
        """Raise the error for a status that is not 0."""
        if status:
            raise self.library.error(status, f"{op} on backend {self.backend}")

    def workspace(self, device: torch.device, op: int, *, rows: int, cols: int, **choices: int) -> torch.Tensor | None:
        """Scratch memory for one call, None if it needs none. Freed by torch, which knows the stream.

        Args:
            device: where the call runs.
            op: te_hal_op.
            rows: as workspace_bytes has it.
            cols: the same.
            choices: ``kind``, ``input_dtype`` and ``output_mode``, 0 where left out.
        """
        kind, dtype, mode = (choices.get(name, 0) for name in ("kind", "input_dtype", "output_mode"))
        size = self.lib.api_workspace_bytes(self.library.api, op, kind, dtype, mode, rows, cols)
        return self.empty((size,), torch.uint8, device) if size > 0 else None

    def runs_on(self, device: int) -> Support:
        """Whether the library opens and has code for a device; the reason in one sentence if not. Starts the device.

        Raises nothing about the library or the device.
        """
        answer = self.opens()
        if not answer:
            return answer
        try:
            self.library.check_device(device)
        except (BackendUnavailableError, StateError) as error:
            return Support.no(Code.ENVIRONMENT, f"{error.where}: {error.got}; {error.todo}")
        return SUPPORTED

    def opens(self) -> Support:
        """Whether there is a library, and it can be opened; the reason in one sentence if not.

        Raises nothing about the library.
        """
        try:
            self.library  # noqa: B018 - opens it
        except BackendUnavailableError as error:
            return Support.no(Code.LOAD_FAILED, f"{error.where}: {error.got}; {error.todo}")
        return SUPPORTED
