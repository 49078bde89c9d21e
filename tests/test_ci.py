"""What the full run selects for the oldest torch, and that the contributor's page says so."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def full():
    spec = spec_from_file_location("ci_full", ROOT / ".ci" / "full.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_oldest_torch_gets_casts_state_and_imports(full):
    chosen = full.core_tests()
    assert len(chosen) == len(set(chosen))
    for file in ("backends/cpu_reference/test_cast.py", "modules/test_state_dict.py", "test_import.py"):
        assert f"tests/{file}" in chosen


def test_a_word_that_selects_no_file_is_an_error(full, tmp_path):
    (tmp_path / "tests").mkdir()
    for word in full.CORE:
        (tmp_path / "tests" / f"test_{word}.py").touch()
    assert len(full.core_tests(tmp_path)) == len(full.CORE)
    (tmp_path / "tests" / f"test_{full.CORE[-1]}.py").unlink()
    with pytest.raises(LookupError, match=f"'{full.CORE[-1]}'"):
        full.core_tests(tmp_path)


def test_the_page_for_contributors_names_the_words(full):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [word for word in full.CORE if f"`{word}`" not in page] == []
