"""Records of benchmarks: reading one, and holding two against each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.cli.bench_outcome import FAILED, REFUSED
from te_hal.cli.bench_run import KIND, VERSION
from te_hal.schema.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Kinds = Mapping[str, type | tuple[type, ...]]

#: What two records should have in common.
_CIRCUMSTANCES = ("backend", "device", "threads", "timed_by", "versions", "size")


@dataclass(frozen=True)
class Change:
    """A call in two records.

    Attributes:
        id: of the call.
        before_us, now_us: the least time; None where it was refused or failed.
    """

    id: str
    before_us: float | None
    now_us: float | None

    @property
    def ratio(self) -> float | None:
        """Now over before; None where one of them is missing."""
        return None if self.before_us is None or self.now_us is None else self.now_us / self.before_us


@dataclass(frozen=True)
class Comparison:
    """Two records of the same calls.

    Attributes:
        slower: calls whose least time grew by more than the threshold, or that no longer run; worst first.
        faster: those whose time fell by more than it; best first.
        unchanged: how many are neither.
        only_before, only_now: ids of calls that one record alone has.
        circumstances: what else differs, a sentence each.
    """

    slower: tuple[Change, ...]
    faster: tuple[Change, ...]
    unchanged: int
    only_before: tuple[str, ...]
    only_now: tuple[str, ...]
    circumstances: tuple[str, ...]


def read_record(path: Path) -> dict[str, Any]:
    """What ``te-hal bench --json`` wrote.

    Raises:
        CheckpointError: cannot be read, is no such record, or of another version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(path, f"a file that cannot be read ({error.strerror})") from None
    except ValueError:
        raise _refused(path, "no JSON") from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise _refused(path, "JSON of something else")
    if content.get("version") != VERSION:
        raise _refused(path, f"version {content.get('version')!r}")
    if not _is_whole(content):
        raise _refused(path, "a record that was cut short or altered")
    return content


_NUMBER = (int, float)
_RECORD: Kinds = {"date": str, "versions": dict, "ceilings": dict, "rows": list}
_CEILINGS: Kinds = {"copy_gb_per_s": _NUMBER, "gemm_tflop_per_s": _NUMBER}
_ROW: Kinds = {"id": str, "op": str, "variant": str, "shape": str}
_TIMED: Kinds = {"us": _NUMBER, "least_us": _NUMBER, "of_ceiling": _NUMBER, "runs": str}
_FP8: Kinds = {"tokens": int, "rows": list, "pays_from": dict}
_WIDTH: Kinds = {"width": int, "bf16_us": (*_NUMBER, type(None)), "scaled_us": dict, REFUSED: dict, FAILED: dict}


def _is_whole(record: dict[str, Any]) -> bool:
    """Whether all is there that is printed or compared."""
    if not _has(record, _RECORD) or not {*_CIRCUMSTANCES, "fp8"} <= record.keys():
        return False
    fp8 = record["fp8"]
    widths = fp8 is None or (_has(fp8, _FP8) and all(_has(row, _WIDTH) for row in fp8["rows"]))
    return widths and _has(record["ceilings"], _CEILINGS) and all(_is_row(row) for row in record["rows"])


def _is_row(row: Any) -> bool:  # noqa: ANN401 - whatever JSON has
    if not _has(row, _ROW):
        return False
    if isinstance(row.get(REFUSED), str) or isinstance(row.get(FAILED), str):
        return "least_us" not in row
    rate = "gb_per_s" if "gb_per_s" in row else "tflop_per_s"
    return _has(row, {**_TIMED, rate: _NUMBER}) and row["least_us"] > 0


def _has(value: object, kinds: Kinds) -> bool:
    """Whether an object of JSON has values of these types."""
    return isinstance(value, dict) and all(
        name in value and isinstance(value[name], kind) and not isinstance(value[name], bool)
        for name, kind in kinds.items()
    )


def _refused(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        str(path), got=got, accepted=f"a record of te-hal bench --json, version {VERSION}", todo="name another file"
    )


def compare_records(now: dict[str, Any], before: dict[str, Any], threshold: float) -> Comparison:
    """What became slower and faster.

    Args:
        now: the record in question.
        before: what it is held against.
        threshold: share of the earlier time by which a call may be slower; 0.1 is 10%.
    """
    mine, theirs = ({row["id"]: row.get("least_us") for row in each["rows"]} for each in (now, before))
    changes = [Change(name, theirs[name], mine[name]) for name in theirs if name in mine]
    slower = [change for change in changes if _is_slower(change, threshold)]
    faster = [c for c in changes if c not in slower and (c.before_us is None or (c.ratio or 1.0) < 1 / (1 + threshold))]
    faster = [change for change in faster if change.now_us is not None]
    return Comparison(
        slower=tuple(sorted(slower, key=lambda change: -(change.ratio or float("inf")))),
        faster=tuple(sorted(faster, key=lambda change: change.ratio or 0.0)),
        unchanged=len(changes) - len(slower) - len(faster),
        only_before=tuple(name for name in theirs if name not in mine),
        only_now=tuple(name for name in mine if name not in theirs),
        circumstances=tuple(
            f"{name}: {before[name]} before, {now[name]} now" for name in _CIRCUMSTANCES if before[name] != now[name]
        ),
    )


def _is_slower(change: Change, threshold: float) -> bool:
    if change.now_us is None:
        return change.before_us is not None
    return change.ratio is not None and change.ratio > 1 + threshold
