"""What a backend admits to: cases that it refuses (unsupported.toml) and failures that are known (xfail.toml)."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from importlib import import_module, metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError, StateError
from te_hal.testing.axes import axes_of
from te_hal.testing.finding import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.abc import Traversable

    from te_hal.testing.case import Case
    from te_hal.testing.finding import Outcome

_FILES = {"unsupported": "unsupported.toml", "xfail": "xfail.toml"}
_GROUP = "te_hal.backends"
_FIELDS = {"op": str, "where": dict, "reason": str, "sometimes": bool}


@dataclass(frozen=True)
class Entry:
    """One table of a list.

    Attributes:
        name: file and number, for reports.
        op: regular expression that names the ops.
        where: axis of a case to a regular expression of its words; all must hold.
        reason: why.
        sometimes: it depends on the device or on a library, so that no case need be refused for it here.
    """

    name: str
    op: str
    reason: str
    where: Mapping[str, str] = field(default_factory=dict)
    sometimes: bool = False

    def holds(self, case: Case) -> bool:
        """Whether the entry is about a case."""
        return re.fullmatch(self.op, case.op) is not None and all(
            axis in case.words and re.fullmatch(words, case.words[axis]) for axis, words in self.where.items()
        )


@dataclass(frozen=True)
class Lists:
    """Both lists of a backend; empty where it has none."""

    refused: tuple[Entry, ...] = ()
    failing: tuple[Entry, ...] = ()

    def unsupported(self, case: Case) -> list[Entry]:
        """Entries of unsupported.toml that are about a case."""
        return [entry for entry in self.refused if entry.holds(case)]

    def expected_failures(self, case: Case) -> list[Entry]:
        """Entries of xfail.toml that are about a case."""
        return [entry for entry in self.failing if entry.holds(case)]

    def stale(self, outcomes: Iterable[Outcome]) -> list[str]:
        """Entries that no outcome of a whole run bears out, each with what to do."""
        needed = {
            name
            for outcome in outcomes
            if outcome.status in (Status.UNSUPPORTED, Status.EXPECTED)
            for name in outcome.listed
        }
        found = [
            f"{entry.name} (op {entry.op}): no case is refused for it; remove it"
            for entry in self.refused
            if entry.name not in needed and not entry.sometimes
        ]
        return found + [
            f"{entry.name} (op {entry.op}): every case of it passes; remove it"
            for entry in self.failing
            if entry.name not in needed
        ]

    @staticmethod
    def of(backend: str) -> Lists:
        """The lists in the package that a backend's entry point names; none of a backend without entry point.

        Raises:
            ArgumentError: a list is no TOML, or an entry lacks its op or reason, has a field that nobody reads, or is
                of an op or an axis that there is not.
            StateError: Python 3.10 without tomli, and there is a list to read.
        """
        points = [point for point in metadata.entry_points(group=_GROUP) if point.name == backend]
        if not points:
            return Lists()
        module = import_module(points[0].module)
        package = module.__name__ if hasattr(module, "__path__") else module.__package__
        return Lists.in_folder(resources.files(package)) if package else Lists()

    @staticmethod
    def in_folder(folder: Traversable | Path) -> Lists:
        """The lists in a folder.

        Raises:
            ArgumentError, StateError: as :meth:`of`.
        """
        refused, failing = (_read(folder / name, kind) for kind, name in _FILES.items())
        return Lists(refused, failing)


def _read(path: Traversable | Path, kind: str) -> tuple[Entry, ...]:
    if not path.is_file():
        return ()
    document = _parse(path)
    entries: list[Entry] = []
    for package in document.pop("include", []):
        entries += _read(resources.files(package) / path.name, kind)
    tables = document.pop(kind, [])
    if document:
        raise _wrong(path.name, f"{', '.join(document)}", f"tables [[{kind}]], and include = [packages]")
    entries += [
        _entry(f"{path.parent.name if isinstance(path, Path) else ''}/{path.name}#{n + 1}", table)
        for n, table in enumerate(tables)
    ]
    return tuple(entries)


def _entry(name: str, table: dict[str, Any]) -> Entry:
    for key, value in table.items():
        if key not in _FIELDS or not isinstance(value, _FIELDS[key]):
            raise _wrong(name, f"{key} = {value!r}", ", ".join(f"{k} ({t.__name__})" for k, t in _FIELDS.items()))
    if not table.get("op") or not table.get("reason", "").strip():
        raise _wrong(name, f"an entry with {', '.join(table) or 'nothing'}", "an entry with op and reason")
    entry = Entry(name=name, **table)
    _check_names(entry)
    return entry


def _check_names(entry: Entry) -> None:
    """Refuse an entry that can hold for no case: of an op or an axis that there is not, or of no regular expression."""
    try:
        ops = [op for op in SCHEMAS if re.fullmatch(entry.op, op)]
        for axis, words in entry.where.items():
            if not isinstance(words, str):
                raise _wrong(entry.name, f"where {axis} = {words!r}", "a regular expression, as text")
            re.compile(words)
    except re.error as error:
        raise _wrong(entry.name, f"an expression that is none: {error}", "regular expressions") from error
    if not ops:
        raise _wrong(entry.name, f"op = {entry.op!r}, which no op matches whole", ", ".join(SCHEMAS))
    for axis in entry.where:
        axes = {known: None for op in ops for known in axes_of(SCHEMAS[op])}
        if axis not in axes:
            raise _wrong(entry.name, f"axis {axis}, which {entry.op} lacks", ", ".join(axes))


def _parse(path: Traversable | Path) -> dict[str, Any]:
    toml = _toml()
    try:
        found: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except toml.TOMLDecodeError as error:
        raise _wrong(path.name, f"text that is no TOML: {error}", "TOML") from error
    return found


def _toml() -> Any:  # noqa: ANN401 - one of two modules of the same interface
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise StateError(
            "te_hal.testing",
            got="Python 3.10 without the package tomli, and a list to read",
            accepted="Python 3.11 or newer, which reads TOML itself, or tomli",
            todo='pip install "te-hal[conformance]"',
        ) from error


def _wrong(where: str, got: str, accepted: str) -> ArgumentError:
    return ArgumentError(where, got=got, accepted=accepted, todo="see docs/conformance.md")
