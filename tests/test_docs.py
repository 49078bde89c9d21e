"""The generated pages match the code, and what documents point at exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from te_hal.schema.catalog import SCHEMAS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_no_generated_page_is_stale():
    ran = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=lambda schema: schema.name)
def test_every_rule_that_a_contract_names_is_written_down(schema):
    written = set(re.findall(r"\b([A-Z][0-9]+)\b", (ROOT / "docs/numerics.md").read_text()))
    assert set(schema.contract.rules) <= written
