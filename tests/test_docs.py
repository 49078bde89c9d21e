"""The generated pages match the code, whatever this machine has built, and what documents point at exists."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from named_tests import missing

from te_hal.dispatch import registry
from te_hal.ffi import loader

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_no_generated_page_is_stale():
    ran = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_the_support_page_asks_neither_a_kernel_library_nor_a_backend_that_may_lack_one(monkeypatch):
    def refuse(path):
        pytest.fail(f"opened {path}")

    def ask(backend, **options):
        assert backend.name in {"cpu_reference", "null"}
        return answer(backend, **options)

    answer = registry.ask_usable
    monkeypatch.setattr(loader._OPEN, "libraries", {})
    monkeypatch.setattr(loader, "_open", refuse)
    monkeypatch.setattr(registry, "ask_usable", ask)
    spec = spec_from_file_location("docs_generate", DOCS / "generate.py")
    generate = module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.support_page() in (DOCS / "support.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_document_that_the_package_names_exists():
    sources = [path for top in ("te_hal", "modules", "backends", "ffi") for path in (ROOT / top).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"\b(?:docs/)?\w+\.md\b", path.read_text())}
    assert "docs/parity.md" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_documentation_lists_every_page():
    listed = set(re.findall(r"^\| \[([^\]]+)\]", (DOCS / "README.md").read_text(), re.MULTILINE))
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= listed


def test_every_difference_names_tests_that_exist():
    rows = re.findall(r"^\| (?!TE \||---)(.*)\|$", (DOCS / "differences.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`([\w/]+\.py::\w+)`", row.split(" | ")[-1])
        assert named, row
        assert missing(named) == []
