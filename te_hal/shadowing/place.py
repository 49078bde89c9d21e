"""The layer that an op runs for: the module whose forward is under way, innermost."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from te_hal.modules.whereabouts import place_in_model

if TYPE_CHECKING:
    from types import FrameType


def running_layer() -> str | None:
    """Where the innermost running module stands; None outside of every forward, as in a backward.

    Returns:
        As in ``layers.3.mlp of GPT``; the class alone where the module is called by itself.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the modules that are running are named nowhere else
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(module, torch.nn.Module):
            return place_in_model(module) or type(module).__name__
        frame = frame.f_back
    return None
