"""parameters_split: one weight as several named parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence


def resolve_splits(out_features: int, split: Sequence[str] | Mapping[str, int] | None) -> dict[str, int]:
    """Parameter name prefixes and their rows.

    Args:
        out_features: rows in all.
        split: None: one part without prefix. Names: equal parts. A mapping: rows per name.

    Returns:
        Prefix (``""`` or ``"<name>_"``, trailing underscores of the name dropped) to rows.

    Raises:
        ArgumentError: no name, a repeated name, or rows that do not add up.
    """
    if split is None:
        return {"": out_features}
    if isinstance(split, str):
        raise _error(out_features, split, "a tuple of names, or a mapping from name to rows")
    if isinstance(split, Mapping):
        rows = dict(split)
    else:
        names = list(split)
        if not names or out_features % len(names):
            raise _error(out_features, names, f"a number of names that divides {out_features}")
        rows = dict.fromkeys(names, out_features // len(names))
    prefixes = {f"{name.rstrip('_')}_": count for name, count in rows.items()}
    if sum(rows.values()) != out_features or len(prefixes) != len(split) or min(rows.values(), default=0) <= 0:
        raise _error(out_features, split, f"distinct names with positive rows that add up to {out_features}")
    return prefixes


def _error(out_features: int, split: object, accepted: str) -> ArgumentError:
    return ArgumentError(
        "Linear: parameters_split",
        got=f"{split!r} for out_features={out_features}",
        accepted=accepted,
        todo="correct parameters_split",
    )
