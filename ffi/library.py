"""Library: an open kernel library, what it says about itself and its devices, and the rule about forks."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from te_hal.ffi.binding import binding
from te_hal.ffi.status import error_for

if TYPE_CHECKING:
    from pathlib import Path

    from te_hal.schema.errors import TeHalError

_HOST = "host"


class DeviceInfo(NamedTuple):
    """A device, as ``te_hal_device_info`` has it."""

    architecture: int
    multiprocessors: int
    wave: int
    shared_memory_per_block: int
    fp8_instruction: bool
    name: str


class Library:
    """A library whose table has passed the checks of table.py. Made by the loader; one per file and process.

    Attributes:
        path: the file.
        api: the table, first argument of every trampoline; a table without entries after a fork.
        backend: "musa", "cuda" or "host".
        architectures: what it holds code for.
        version: of te_hal when it was built.
        source_hash: of the sources it was built from.
        compiler: name, version and variant.
        forked: this process is a fork of the one that opened it, and its device runtime did not survive that.
    """

    def __init__(self, path: Path, api: Any) -> None:  # noqa: ANN401 - cffi's pointer
        lib = binding().lib
        self.path = path
        self.api = api
        self.backend = self._text(lib.api_backend)
        self.architectures = tuple(self._text(lib.api_architectures).split(","))
        self.version = self._text(lib.api_version)
        self.source_hash = self._text(lib.api_source_hash)
        self.compiler = self._text(lib.api_compiler)
        self.forked = False
        if self.backend != _HOST:
            _DEVICE_LIBRARIES.add(self)

    def _text(self, read: Any) -> str:  # noqa: ANN401 - cffi's function
        return str(binding().ffi.string(read(self.api)).decode(errors="replace"))

    def last_error(self) -> str:
        """The sentence for this thread's last failure; empty if there was none."""
        return self._text(binding().lib.api_last_error)

    def error(self, status: int, where: str) -> TeHalError:
        """The error for a status that is not 0, with the library's own sentence. Call it in the failing thread."""
        return error_for(status, where, self.last_error(), forked=self.forked)

    def device_count(self) -> int:
        """Number of devices that the library's runtime sees; 0 without a driver. May start the runtime."""
        count = binding().ffi.new("int32_t *")
        status = binding().lib.api_device_count(self.api, count)
        if status not in (binding().lib.TE_HAL_OK, binding().lib.TE_HAL_NO_DEVICE):
            raise self.error(status, f"device_count of {self.path.name}")
        return int(count[0])

    def check_device(self, device: int) -> None:
        """Nothing, if the library can run on a device. May start the runtime.

        Raises:
            BackendUnavailableError: no such device, or no code for its architecture; names both.
        """
        status = binding().lib.api_check_device(self.api, device)
        if status:
            raise self.error(status, f"{self.path.name} on device {device}")

    def device_info(self, device: int) -> DeviceInfo:
        """Describe a device. May start the runtime.

        Raises:
            BackendUnavailableError: no such device.
        """
        ffi = binding().ffi
        info = ffi.new("te_hal_device_info *")
        info.struct_size = ffi.sizeof("te_hal_device_info")
        status = binding().lib.api_device_info(self.api, device, info)
        if status:
            raise self.error(status, f"device_info of {self.path.name}")
        return DeviceInfo(
            info.architecture,
            info.multiprocessors,
            info.wave,
            info.shared_memory_per_block,
            bool(info.fp8_instruction),
            ffi.string(info.name).decode(errors="replace"),
        )

    def __repr__(self) -> str:
        return f"Library({self.path.name}, {self.backend}, {','.join(self.architectures)}, {self.compiler})"


_DEVICE_LIBRARIES: weakref.WeakSet[Library] = weakref.WeakSet()


def _close_in_child() -> None:
    """Device runtimes do not survive a fork: from here on every call answers that it must not be made."""
    for library in list(_DEVICE_LIBRARIES):
        library.api = binding().lib.te_hal_closed()
        library.forked = True


os.register_at_fork(after_in_child=_close_in_child)
