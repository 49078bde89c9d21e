"""SavedState: what the extra state of one module holds, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SavedState:
    """What one ``_extra_state`` holds: the recipe's class name and printable fields, and fp32 CPU arrays by name."""

    recipe: str
    fields: dict[str, Any]
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
