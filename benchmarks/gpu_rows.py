"""Rows of times on a GPU: how they are measured, printed beside their goals, and kept.

Each time is a median. Times of the device are of events around one call, with 1 GiB written before it, so that nothing
lies in the cache and the host is ahead of the device. A goal was set beside the time of a base, so a miss is judged by
the ratio to that base in this run.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import environment_line
import torch

from te_hal.schema.errors import TeHalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

WARM_UP = 5


class Row(NamedTuple):
    """One measurement.

    Attributes:
        work: what, by name.
        run: does it once.
        goal: us, beside the base's time where goals come from; None: none.
        recorded: us that Transformer Engine 2.20 took on another day on a machine of this kind; None: not known.
    """

    work: str
    run: Callable[[], object]
    goal: float | None = None
    recorded: float | None = None


class Base(NamedTuple):
    """What ratios are to: the row of that name, and its us where the goals come from."""

    work: str
    us: float


COPY = Base("copy", 67.9)


class Group(NamedTuple):
    """Rows that are made and measured alike; making them may fail without harm to other groups."""

    name: str
    rows: Callable[[], Sequence[Row]]
    measure: Callable[[Callable[[], object]], float]
    base: Base = COPY


def device_us(run: Callable[[], object], rounds: int = 30) -> float:
    """Median time of one call on the device."""
    flush = torch.empty(1 << 28, dtype=torch.int32, device="cuda")
    times = []
    for index in range(rounds + WARM_UP):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if index >= WARM_UP:
            times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def host_us(run: Callable[[], object], rounds: int = 300) -> float:
    """Median time of one call on the host, which does not wait for the device in between."""
    for _ in range(50):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
        if len(times) % 20 == 0:
            torch.cuda.synchronize()
    return statistics.median(times)


class Table:
    """Prints rows as they are measured, and writes all of them after each group.

    Args:
        path: where; None: nowhere.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.environment = path, environment_line.describe("cuda")
        self.rows: list[dict[str, Any]] = []
        self.bases: dict[str, float] = {}
        self.failed = False
        print(self.environment)

    def add(self, group: Group) -> None:
        """Measure a group. What fails is printed, and the next group's turn comes."""
        print(f"\n{group.name}, beside {group.base.work!r}")
        try:
            for row in group.rows():
                self._add(row, group)
        except (TeHalError, RuntimeError) as error:
            self.failed = True
            print(f"FAIL {group.name}: {type(error).__name__}: {error}")
        torch.cuda.empty_cache()
        self.write()

    def _add(self, row: Row, group: Group) -> None:
        found = group.measure(row.run)
        if row.work == group.base.work:
            self.bases[row.work] = found
        base = self.bases.get(group.base.work)
        ratio = None if base is None else found / base
        wanted = None if row.goal is None else row.goal / group.base.us
        shown = "" if ratio is None else f"{ratio:7.2f} x"
        goal = "" if wanted is None else f"goal {row.goal:7.0f} us, {wanted:7.2f} x"
        missed = wanted is not None and ratio is not None and ratio > wanted
        said = f"{row.work:34s} {found:9.1f} us {shown:9s}  {goal:28s} {'MISSED' if missed else '':6s}"
        print(said + ("" if row.recorded is None else f"  TE {row.recorded}"), flush=True)
        kept = {"work": row.work, "us": found, "base": group.base.work, "ratio": ratio, "goal us": row.goal}
        self.rows.append({**kept, "goal ratio": wanted, "TE us": row.recorded})

    def write(self, **more: object) -> None:
        """Write what is known, and ``more`` beside it."""
        if self.path is not None:
            self.path.write_text(json.dumps({"environment": self.environment, "rows": self.rows, **more}, indent=1))
