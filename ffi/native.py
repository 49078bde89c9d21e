"""Native: a kernel library as one backend uses it. What the marshalling is given first."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from te_hal.ffi.allocation import empty_for
from te_hal.ffi.binding import binding
from te_hal.ffi.devices import Preparation
from te_hal.ffi.locations import find_library
from te_hal.schema.errors import BackendUnavailableError, StateError
from te_hal.schema.support import SUPPORTED, Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from te_hal.ffi.devices import Devices
    from te_hal.ffi.library import Library

    Kernel = Callable[..., Any]


#: What an operand of several tensors comes in, all of them on one device.
_SEVERAL = (list, tuple)
_BY_BACKEND: dict[str, Native] = {}


def native_of(backend: str) -> Native | None:
    """What the kernels of a backend are bound to; None if it runs no kernel library, or was not loaded."""
    return _BY_BACKEND.get(backend)


class Native:
    """A kernel library with what its backend adds: a name, the stream to work on, and the device to be on.

    The library is looked for and opened when it is first used, not before.

    Args:
        backend: name of the backend, for messages.
        target: of the library: "musa", "cuda" or "host"; of another's, what its table says of itself.
        devices: how calls find their device and stream.
        find: opens the library, for one that is not te_hal's own; default: the target's, where te_hal keeps it.

    Attributes:
        empty: makes a contiguous tensor from shape, dtype and device.
        lib: the trampolines, and ``ffi`` their tool for structs.
        library: the open library; its ``api`` is their first argument.
    """

    ffi: Any
    lib: Any
    library: Library

    def __init__(self, backend: str, target: str, devices: Devices, find: Callable[[], Library] | None = None) -> None:
        self.backend = backend
        self.target = target
        self.stream = devices.stream
        # Not declared as what empty_for gives: the conformance kit puts another function here for a while.
        self.empty: Callable[[Any, torch.dtype, Any], torch.Tensor] = empty_for(devices.type)
        self._find = find or functools.partial(find_library, target)
        self._devices = devices
        self._prepared = Preparation()
        self._ones: dict[torch.device, torch.Tensor] = {}
        _BY_BACKEND[backend] = self

    def __getattr__(self, name: str) -> object:
        """The first use of ``library`` and its companions; from then on they are plain attributes."""
        if name not in {"ffi", "lib", "library"}:
            raise AttributeError(name)
        lib, ffi = binding()
        self.library = self._find()
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
        current_device, ready = self._devices.current, self._prepared.ready
        if current_device is None:
            return bound

        @functools.wraps(bound)
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on what the op's schema says
            first = args[0] if args else next(iter(kwargs.values()))
            device = (first[0] if type(first) in _SEVERAL else first).device
            index = device.index
            if index in ready and index == current_device():
                return function(self, *args, **kwargs)
            with self._on(device):
                return function(self, *args, **kwargs)

        return run

    def _on(self, device: torch.device) -> AbstractContextManager[object]:
        """The way to a device that the calling thread is not on, or that no kernel has run on yet."""
        if device.index not in self._prepared.ready:
            with self._devices.enter(device):
                self._prepared.prepare(self, device)
        return self._devices.enter(device)

    def check(self, status: int, op: str) -> None:
        """Raise the error for a status that is not 0."""
        if status:
            raise self.library.error(status, f"{op} on backend {self.backend}")

    def workspace(
        self,
        device: torch.device,
        op: int,
        *,
        rows: int,
        cols: int,
        kind: int = 0,
        input_dtype: int = 0,
        output_mode: int = 0,
    ) -> torch.Tensor | None:
        """Scratch memory for one call, None if it needs none. Freed by torch, which knows the stream.

        Args:
            device: where the call runs.
            op: te_hal_op.
            rows: as workspace_bytes has it.
            cols: the same.
            kind: the same; 0 where it says nothing of it, here and below.
            input_dtype: the same.
            output_mode: the same.
        """
        size = self.lib.api_workspace_bytes(self.library.api, op, kind, input_dtype, output_mode, rows, cols)
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
