"""Tests that a list or a page refers to by name, as `folder/test_file.py::test_claim` under tests/."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

TESTS = Path(__file__).parent


def missing(names: Iterable[str]) -> list[str]:
    """Those of the names that no test has."""
    return [name for name in names if name.partition("::")[2] not in _functions(TESTS / name.partition("::")[0])]


def _functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
