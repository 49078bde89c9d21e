"""From the status of a native call to the project's error."""

from __future__ import annotations

import functools
from typing import NamedTuple

from te_hal.ffi.binding import binding
from te_hal.schema.errors import (
    ArgumentError,
    BackendUnavailableError,
    KernelError,
    StateError,
    TeHalError,
    UnsupportedError,
)


class _Meaning(NamedTuple):
    name: str
    error: type[TeHalError]
    accepted: str
    todo: str


_WHAT_THE_HEADER_SAYS = "what ffi/include/te_hal.h says of the entry"
_CORRECT = "correct the argument that the sentence names"
_REPORT = "report it with the call that led here; it is a defect of te_hal or of the library"
_MEANINGS = (
    _Meaning("INVALID_ARGUMENT", ArgumentError, _WHAT_THE_HEADER_SAYS, _CORRECT),
    _Meaning("MISALIGNED", ArgumentError, "addresses that are multiples of the element's size", "copy the tensor"),
    _Meaning("SIZE_OVERFLOW", ArgumentError, "fewer elements", "split the tensor"),
    _Meaning("OVERLAP", ArgumentError, "outputs that share no memory with anything else", "pass a separate tensor"),
    _Meaning("WORKSPACE_TOO_SMALL", KernelError, "a workspace of workspace_bytes()", _REPORT),
    _Meaning("UNSUPPORTED", UnsupportedError, "what supports() agrees to", "choose another backend for the call"),
    _Meaning("NO_DEVICE", BackendUnavailableError, "a device with its driver", "check the driver and what it shows"),
    _Meaning(
        "WRONG_ARCHITECTURE",
        BackendUnavailableError,
        "a library with code for this device",
        "build it for the device: te-hal build-kernels --arch",
    ),
    _Meaning("OUT_OF_MEMORY", KernelError, "a call that fits into memory", "free memory, or make the tensors smaller"),
    _Meaning("DEVICE_ERROR", KernelError, "success", "look at earlier work on the device too: errors arrive late"),
    _Meaning("KERNEL_FAULT", KernelError, "a kernel that keeps the devices' rules", _REPORT),
    _Meaning("INTERNAL_ERROR", KernelError, "success", _REPORT),
)


@functools.cache
def _by_status() -> dict[int, _Meaning]:
    return {int(getattr(binding().lib, f"TE_HAL_{meaning.name}")): meaning for meaning in _MEANINGS}


def error_for(status: int, where: str, sentence: str, *, forked: bool = False) -> TeHalError:
    """The error that stands for a status.

    Args:
        status: what the entry returned; not TE_HAL_OK.
        where: op and backend.
        sentence: the library's last_error().
        forked: the library was closed because this process is a fork of one that had opened it.
    """
    if status == binding().lib.TE_HAL_MISSING_ENTRY:
        return _missing(where, forked=forked)
    meaning = _by_status().get(status)
    if meaning is None:
        known = ", ".join(str(number) for number in _by_status())
        return KernelError(
            where,
            got=f"status {status}, which te_hal does not know ({sentence or 'no sentence with it'})",
            accepted=f"0 for success, {known} for failures",
            todo="use a library that was built for this version of te_hal",
        )
    return meaning.error(
        where, got=sentence or f"status {meaning.name} without a sentence", accepted=meaning.accepted, todo=meaning.todo
    )


def _missing(where: str, *, forked: bool) -> TeHalError:
    if forked:
        return StateError(
            where,
            got="a call in a forked process, whose parent had already opened the device",
            accepted="use in the process that opened the device",
            todo="start workers with the 'spawn' method, or fork before the backend is first used",
        )
    return UnsupportedError(
        where,
        got="a library without this entry",
        accepted="one whose ABI version is as new as te_hal's",
        todo="build the library again: te-hal build-kernels",
    )
