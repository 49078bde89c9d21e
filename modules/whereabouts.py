"""Where in the user's model a module stands, for messages: asked only when something is wrong."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import FrameType

    from te_hal.schema.errors import TeHalError


def locate(error: TeHalError, module: object) -> None:
    """Have the message of an error say where in the running model the module stands, in place.

    Args:
        error: raised by the module's forward; one that says where already stays as it is.
        module: the module.
    """
    if isinstance(module, torch.nn.Module) and not hasattr(error, "place"):
        place = place_in_model(module)
        if place is not None:
            error.tell_place(place)


def place_in_model(module: torch.nn.Module) -> str | None:
    """Name of the module in the outermost model that is running now, and that model's class.

    Returns:
        As in ``layers.3.mlp of GPT``; None where the module is called by itself.
    """
    outermost = module
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the modules that are running are named nowhere else
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(caller, torch.nn.Module):
            outermost = caller
        frame = frame.f_back
    if outermost is module:
        return None
    name = next((name for name, part in outermost.named_modules() if part is module), None)
    return None if name is None else f"{name} of {type(outermost).__name__}"
