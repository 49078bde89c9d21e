"""Pickles put together by hand or through stand-ins for Transformer Engine's classes, for readers that run nothing."""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE_MODULE = "transformer_engine.common.recipe"


@contextlib.contextmanager
def recorded_classes() -> Iterator[types.ModuleType]:
    """Classes of the recorded names, so that pickle writes references to them; gone again afterwards."""
    module = types.ModuleType(RECIPE_MODULE)

    class Limits(NamedTuple):
        max_fwd: float
        max_bwd: float

    class Override(NamedTuple):
        fprop: bool = False
        dgrad: bool = False
        wgrad: bool = False

    class Format(enum.Enum):
        E4M3 = Limits(448, 448)
        E5M2 = Limits(57344, 57344)
        HYBRID = Limits(448, 57344)

    made = {"_FormatHelper": Limits, "_OverrideLinearPrecision": Override, "Format": Format}
    for name in ("DelayedScaling", "Float8CurrentScaling", "Foreign"):
        made[name] = type(name, (), {})
    for name, kind in made.items():
        kind.__module__, kind.__qualname__, kind.__name__ = RECIPE_MODULE, name, name
        setattr(module, name, kind)
    parts = {"transformer_engine": types.ModuleType("transformer_engine"), RECIPE_MODULE: module}
    parts["transformer_engine.common"] = types.ModuleType("transformer_engine.common")
    sys.modules.update(parts)
    try:
        yield module
    finally:
        for name in parts:
            del sys.modules[name]


def recipe_of(module: types.ModuleType, name: str = "DelayedScaling", **fields: Any) -> Any:
    """An instance of a recorded class with these fields."""
    made = getattr(module, name)()
    made.__dict__.update(fields)
    return made


def arrays(rows: int = 4, forward: int = 3, backward: int = 2) -> dict[str, torch.Tensor]:
    """Scales and histories with values that are all different."""
    generator = torch.Generator().manual_seed(5)
    return {
        "scale_fwd": torch.rand(forward, generator=generator) + 1,
        "amax_history_fwd": torch.rand(rows, forward, generator=generator),
        "scale_bwd": torch.rand(backward, generator=generator) + 1,
        "amax_history_bwd": torch.rand(rows, backward, generator=generator),
    }


def pickled(value: object, protocol: int = 4) -> torch.Tensor:
    """As Transformer Engine 2.x and 0.x with tensors save it."""
    return as_tensor(pickle.dumps(value, protocol))


def as_tensor(data: bytes) -> torch.Tensor:
    """Bytes as an extra state."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def archived(value: object) -> io.BytesIO:
    """As Transformer Engine 1.x saves it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer
