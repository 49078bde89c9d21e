"""A known trap: an input on which systems of this kind failed, and the tests that hold the right value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """What it is about, and the tests that hold it, as `folder/test_file.py::test_claim` under tests/."""

    about: str
    tests: tuple[str, ...]
