"""The generated pages match the code, whatever this machine has built, and what documents point at exists."""

from __future__ import annotations

import ast
import inspect
import math
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from named_tests import missing

import te_hal
import te_hal.modules as te
from te_hal import ops, recipe
from te_hal.dispatch import forced_backend, register_backend, registry
from te_hal.ffi import loader
from te_hal.quantization.recipe_support import recipe_support
from te_hal.schema.catalog import SCHEMAS

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


def test_what_the_support_page_says_of_the_native_kernels_and_recipes_is_what_they_answer():
    head, *rows = re.findall(r"^\| (?:op|recipe \w+) .*$", (DOCS / "support.md").read_text(), re.MULTILINE)
    column = head.split(" | ").index("musa_emulator")
    told = {cells[0].split()[-1]: cells[column] for cells in (row.split(" | ") for row in rows) if "recipe" in cells[0]}
    assert (told["MXFP8BlockScaling"], told["MTFP8BlockScaling"]) == ("library", "library")
    if not any(backend.name == "musa_emulator" and backend.usable for backend in te_hal.list_backends()):
        pytest.skip("backend musa_emulator is not built")
    with te_hal.use_backend("musa_emulator"):
        backend = forced_backend()
    for name, answer in told.items():
        support = recipe_support(getattr(recipe, name)(), backend, torch.device("cpu"))
        assert answer == ("library" if support else "no"), support.sentence


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_document_that_the_package_names_exists():
    sources = [path for top in ("te_hal", "modules", "backends", "ffi") for path in (ROOT / top).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"\b(?:docs/)?\w+\.md\b", path.read_text())}
    assert "docs/te_parity.md" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_documentation_lists_every_page():
    listed = set(re.findall(r"^\| \[([^\]]+)\]", (DOCS / "README.md").read_text(), re.MULTILINE))
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= listed


@pytest.mark.parametrize(("page", "heading"), [("differences.md", "TE"), ("modules.md", "what")])
def test_every_row_names_tests_that_exist(page, heading):
    rows = re.findall(rf"^\| (?!{heading} \||---)(.*)\|$", (DOCS / page).read_text(), re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`([\w/]+\.py::\w+)`", row.split(" | ")[-1])
        assert named, row
        assert missing(named) == []


@pytest.mark.parametrize("op", SCHEMAS)
def test_the_ops_page_shows_each_op_as_python_takes_it(op):
    page = (DOCS / "ops.md").read_text()
    (shown,) = re.findall(rf"## {op}\n.*\n\n```python\n(.*)\n```\n", page)
    arguments = ast.parse(f"def {shown}: pass").body[0].args
    parameters = inspect.signature(getattr(ops, op)).parameters.values()
    by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert [argument.arg for argument in arguments.kwonlyargs] == by_keyword
    assert [argument.arg for argument in arguments.args] == [p.name for p in parameters if p.name not in by_keyword]
    found = dict(zip(by_keyword, arguments.kw_defaults, strict=True))
    with_default = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    found |= {a.arg: value for a, value in zip(with_default, arguments.defaults, strict=True)}
    assert {name: ast.literal_eval(value) for name, value in found.items() if value is not None} == {
        p.name: p.default for p in parameters if p.default is not p.empty
    }


def test_the_backend_page_says_that_results_are_not_checked_and_what_a_factory_must_not_do():
    page = " ".join((DOCS / "backends.md").read_text().split())
    for sentence in ("What a kernel returns is **not** checked", "do not call `sys.exit`", "(conformance.md)"):
        assert sentence in page


@pytest.fixture
def example_backend():
    """The backend that the page calls complete."""
    source = (DOCS / "backends.md").read_text().split("```python\n")[1].split("```")[0]
    module = {}
    exec(compile(source, "backends.md", "exec"), module)  # noqa: S102 - this repository's own page
    backend = module["create_backend"]()
    register_backend(backend)
    with te_hal.use_backend(backend.name):
        yield backend


INPUTS = {
    "negative": [1.0, -3.0, 2.0],
    "empty": [],
    "nan": [math.nan, -2.0],
    "only_nan": [math.nan, math.nan],
    "infinity": [math.nan, -math.inf, 5.0],
    "zero": [-0.0],
}


@pytest.mark.usefixtures("example_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("out", [None, 0.0, [0.5], [[4.0]], [[[math.nan]]], math.inf], ids=str)
def test_the_example_backend_keeps_the_contract_of_its_op(values, dtype, out):
    running = None if out is None else torch.tensor(out)
    candidates = [abs(v) for v in values] + ([] if running is None else [running.item()])
    expected = max([v for v in candidates if not math.isnan(v)], default=0.0)
    found = ops.amax(torch.tensor(values, dtype=dtype), out=running)
    assert found.dtype == torch.float32
    assert found.shape == ((1,) if running is None else running.shape)
    assert found.item() == expected
    assert running is None or found is running


@pytest.mark.usefixtures("example_backend")
def test_the_example_backend_takes_any_shape_and_layout_and_declines_what_it_says():
    assert ops.amax(torch.tensor(-2.0)).tolist() == [2.0]
    assert ops.amax(torch.arange(-12.0, 0).view(3, 4).t()).tolist() == [12.0]
    assert ops.amax(torch.zeros(2, 0, 3)).tolist() == [0.0]
    with pytest.raises(NotImplementedError, match="has no fp16 kernel"):
        ops.amax(torch.ones(2, dtype=torch.float16))


def test_a_forward_on_meta_needs_a_backend_chosen_by_name_and_gives_shapes():
    module, x = te.Linear(32, 48, device="meta"), torch.randn(8, 32, device="meta")
    with pytest.raises(te_hal.schema.errors.BackendUnavailableError, match="none that claims it"):
        module(x)
    with te_hal.use_backend("null"), te.autocast():
        y = module(x)
    assert (y.shape, y.is_meta) == ((8, 48), True)


def test_a_module_made_on_meta_takes_a_loaded_state_as_its_parameters():
    module, source = te.Linear(32, 48, device="meta"), te.Linear(32, 48)
    module.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(8, 32)
    with te.autocast():
        found = module(x)
    with te.autocast():
        assert torch.equal(found, source(x))
