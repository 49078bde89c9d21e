"""parameters_split: one weight as several named parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from te_hal.schema.errors import ArgumentError


def resolve_splits(where: str, out_features: int, split: Sequence[str] | Mapping[str, int] | None) -> dict[str, int]:
    """Parameter name prefixes and their rows.

    Args:
        where: the module's class, for messages.
        out_features: rows in all.
        split: None: one part without prefix. Names: equal parts. A mapping: rows per name.

    Returns:
        Prefix (``""`` or ``"<name>_"``, trailing underscores of the name dropped) to rows.

    Raises:
        ArgumentError: no name, one that is no text, a repeated one, or rows that are no ints or do not add up.
    """
    if split is None:
        return {"": out_features}
    if isinstance(split, str) or not isinstance(split, (Mapping, Sequence)):
        raise _error(where, out_features, split, "a tuple of names, or a mapping from name to rows")
    if not all(isinstance(name, str) and name and "." not in name for name in split):
        raise _error(where, out_features, split, "names that are texts without a dot")
    rows = _rows(where, out_features, split)
    if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in rows.values()):
        raise _error(where, out_features, split, "positive ints as rows")
    prefixes = {f"{name.rstrip('_')}_": count for name, count in rows.items()}
    if sum(rows.values()) != out_features or len(prefixes) != len(split):
        raise _error(where, out_features, split, f"distinct names with rows that add up to {out_features}")
    return prefixes


def _rows(where: str, out_features: int, split: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    if isinstance(split, Mapping):
        return dict(split)
    if not split or out_features % len(split):
        raise _error(where, out_features, split, f"a number of names that divides {out_features}")
    return dict.fromkeys(split, out_features // len(split))


def _error(where: str, out_features: int, split: object, accepted: str) -> ArgumentError:
    return ArgumentError(
        f"{where}: parameters_split",
        got=f"{split!r} for out_features={out_features}",
        accepted=accepted,
        todo="correct parameters_split",
    )


def refuse_several(where: str, splits: Mapping[str, int]) -> None:
    """Refuse more than one weight beside fuse_wgrad_accumulation.

    Raises:
        ArgumentError: there are several.
    """
    if len(splits) > 1:
        raise ArgumentError(
            f"{where}: fuse_wgrad_accumulation",
            got=f"{len(splits)} weights by parameters_split",
            accepted="one weight: its gradient is written into one main_grad",
            todo="leave one of the two arguments out",
        )
