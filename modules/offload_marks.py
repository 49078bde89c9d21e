"""Which tensors an offload context leaves on the device: weights, and what somebody marked."""

from __future__ import annotations

import functools
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from te_hal.schema.errors import ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Generator


class _Active(threading.local):
    """Addresses of memory that stays, while a context of the calling thread collects them."""

    def __init__(self) -> None:
        self.staying: set[int] | None = None


_active = _Active()
#: Address to the tensors there that were marked; it counts as long as one of them lives.
_marked: dict[int, list[weakref.ref[torch.Tensor]]] = {}


def mark_not_offload(*tensors: object) -> None:
    """Leave tensors on the device inside get_cpu_offload_context, as long as these very objects live.

    Raises:
        ArgumentTypeError: no tensor.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            got = f"a {type(tensor).__name__}"
            raise ArgumentTypeError("mark_not_offload", got=got, accepted="tensors", todo="pass tensors only")
        place = address(tensor)
        known = _marked.setdefault(place, [])
        if not any(reference() is tensor for reference in known):
            known.append(weakref.ref(tensor, functools.partial(_forget, place)))


def _forget(place: int, gone: weakref.ref[torch.Tensor]) -> None:
    """A marked tensor at an address is gone; its memory may be another's from now on."""
    left = [reference for reference in _marked.pop(place, ()) if reference is not gone]
    if left:
        _marked[place] = left


def note_staying(*tensors: torch.Tensor | None) -> None:
    """Have the context in force, if any, leave these where they are."""
    if _active.staying is not None:
        _active.staying.update(address(tensor) for tensor in tensors if tensor is not None)


def collects() -> bool:
    """Whether a context of the calling thread is in force."""
    return _active.staying is not None


def stays(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of those."""
    place = address(tensor)
    return place in _marked or (_active.staying is not None and place in _active.staying)


@contextmanager
def collecting() -> Generator[None, None, None]:
    """Collect what stays inside a ``with`` block: parameters of every module that runs, and what modules note."""
    before, _active.staying = _active.staying, set(_active.staying or ())
    handle = torch.nn.modules.module.register_module_forward_pre_hook(_note_parameters)
    try:
        yield
    finally:
        handle.remove()
        _active.staying = before


def _note_parameters(module: torch.nn.Module, _: object) -> None:
    if _active.staying is not None:
        for parameter in module.parameters(recurse=False):
            tensors = parameter.quantized_storage.tensors() if hasattr(parameter, "quantized_storage") else (parameter,)
            note_staying(*tensors)


def address(tensor: torch.Tensor) -> int:
    """Of a tensor's memory, which views share."""
    return tensor.untyped_storage().data_ptr()
