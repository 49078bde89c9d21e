"""docs/numerics.md holds every rule that the rest of the repository names, once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from te_hal.schema.catalog import SCHEMAS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "numerics.md").read_text()
WRITTEN = re.findall(r"^\*\*([A-Z]+\d+)\.\*\*", PAGE, re.MULTILINE)
SOURCES = sorted(
    path for folder in ("te_hal", "backends", "modules", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
MENTION = re.compile(r"numerics\.md, (?:rules? )?([A-Z]+\d)(?:(?:-| to | and )([A-Z]+\d))?")


def test_no_rule_is_numbered_twice() -> None:
    assert len(WRITTEN) == len(set(WRITTEN))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))))
def test_every_test_file_that_the_page_names_exists(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_rule_of_a_contract_is_written(op: str) -> None:
    assert set(SCHEMAS[op].contract.rules) <= set(WRITTEN)


def test_every_rule_that_a_source_file_names_is_written() -> None:
    named = {
        (str(path.relative_to(ROOT)), rule)
        for path in SOURCES
        for mention in MENTION.finditer(path.read_text())
        for rule in mention.groups()
        if rule
    }
    assert len(named) > 10
    assert not {(path, rule) for path, rule in named if rule not in WRITTEN}
