"""The folders are one package, and each layer imports only what stands below it."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "te_hal"
LINKED = ("backends", "modules", "ffi")

# Layer -> the layers it may import besides itself. What is not listed (te_hal/cli, te_hal/testing, the files
# directly in te_hal) stands above everything. Between backends a test of its own forbids imports.
MAY_IMPORT = {
    "schema": set(),
    "ffi": {"schema"},
    "backends": {"schema", "ffi"},
    "dispatch": {"schema"},
    "ops": {"schema", "dispatch"},
    "recipe": {"schema"},
    "quantization": {"schema", "dispatch", "ops", "recipe"},
    "optimizers": {"schema", "dispatch", "ops", "recipe", "quantization"},
    "modules": {"schema", "dispatch", "ops", "recipe", "quantization", "optimizers"},
    "monitoring": {"schema", "ops", "quantization", "modules"},
    "explaining": {"schema", "dispatch", "quantization", "modules"},
    "shadowing": {"schema", "dispatch", "modules", "testing"},
    "doctor": {"schema", "dispatch", "ffi", "cli"},
}
DEVICE_NEUTRAL = (
    *("explaining", "monitoring", "shadowing"),
    *("modules", "optimizers", "recipe", "quantization", "schema", "dispatch", "ops"),
)
#: Layers whose docstrings and messages name no vendor either. Modules describe arguments of Transformer Engine.
NEUTRAL_IN_WORDS = ("optimizers", "recipe", "quantization", "schema", "dispatch", "ops")
#: Names of a vendor's chips, which no identifier has.
CHIPS = {"hopper", "blackwell", "ampere"}
VENDOR_WORDS = {
    *("musa", "mudnn", "mublas", "mccl", "mthreads", "cuda", "cudnn", "cublas", "nccl", "nvidia"),
    *("hip", "rocm", "amd", "xpu", "npu", "hpu", "cffi"),
}
#: Transformer Engine's public names, which modules must be able to refuse by name.
NAMES_OF_TRANSFORMER_ENGINE = {"CudaRNGStatesTracker", "get_cudnn_version"}


def source_files(folder: Path) -> list[Path]:
    """Python files and stubs under `folder`, links followed."""
    found: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name != "__pycache__":
            found += source_files(entry)
        elif entry.suffix in {".py", ".pyi"}:
            found.append(entry)
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names that `tree` imports, wherever in it; a relative import starts with a dot.

    `from te_hal import recipe` gives te_hal.recipe. `import_module("...")` with a literal counts too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.args[0].value


def layer_imports(layer: str) -> Iterator[tuple[str, str, list[str]]]:
    """Of each te_hal import in a layer: the file, the imported name, and that name's parts after te_hal."""
    for path in source_files(PACKAGE / layer) if (PACKAGE / layer).exists() else []:
        for imported in imports(parsed(path)):
            root, *rest = imported.split(".")
            if root == "te_hal":
                yield name_of(path), imported, rest


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Every name that `tree` defines, reads or passes, and every string that is exactly one word."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+", node.value):
            yield node.value


def words(identifier: str) -> set[str]:
    """Lower-case words of an identifier: `CudaRNGState` and `cuda_rng_state` both hold `cuda`."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)}


@pytest.mark.parametrize("folder", LINKED)
def test_a_top_level_folder_is_a_link_inside_the_package(folder: str) -> None:
    assert (PACKAGE / folder).readlink() == Path(f"../{folder}")
    assert (PACKAGE / folder / "__init__.py").samefile(ROOT / folder / "__init__.py")


@pytest.mark.parametrize("path", source_files(PACKAGE), ids=name_of)
def test_a_file_imports_the_package_by_its_absolute_name(path: Path) -> None:
    wrong = [name for name in imports(parsed(path)) if name.split(".")[0] in {"", *LINKED}]
    assert not wrong, f"write te_hal.<...> for {wrong}"


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_only_what_stands_below_it(layer: str) -> None:
    allowed = {layer, *MAY_IMPORT[layer], "_version"}
    wrong = [f"{file} imports {name}" for file, name, rest in layer_imports(layer) if not {*rest[:1]} & allowed]
    assert not wrong, f"te_hal.{layer} may import {sorted(allowed)} of te_hal"


def test_a_backend_imports_no_other_backend() -> None:
    wrong = [
        f"{file} imports {name}"
        for file, name, rest in layer_imports("backends")
        if rest[:1] == ["backends"] and rest[1:2] != [Path(file).parts[2]]
    ]
    assert not wrong


@pytest.mark.parametrize("layer", DEVICE_NEUTRAL)
def test_a_device_neutral_layer_names_no_vendor(layer: str) -> None:
    files = source_files(PACKAGE / layer) if (PACKAGE / layer).exists() else []
    wrong = [
        f"{name_of(path)}: {name}"
        for path in files
        for name in identifiers(parsed(path))
        if words(name) & VENDOR_WORDS and name not in NAMES_OF_TRANSFORMER_ENGINE
    ]
    assert not wrong


@pytest.mark.parametrize("layer", NEUTRAL_IN_WORDS)
def test_the_docstrings_and_messages_of_the_core_name_no_vendor(layer: str) -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}: {node.value.strip()[:60]}"
        for path in source_files(PACKAGE / layer)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and words(node.value) & (VENDOR_WORDS | CHIPS)
    ]
    assert not wrong


def backend_folders() -> list[str]:
    return sorted(entry.name for entry in (ROOT / "backends").iterdir() if (entry / "__init__.py").exists())


@pytest.mark.parametrize("deleted", [*backend_folders(), "all of them"])
def test_the_package_imports_without_a_backend_folder(deleted: str, tmp_path: Path) -> None:
    copy = tmp_path / "te_hal"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in backend_folders() if deleted == "all of them" else [deleted]:
        shutil.rmtree(copy / "backends" / name)
    program = "import te_hal, te_hal.modules; print(te_hal.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == copy / "__init__.py"
