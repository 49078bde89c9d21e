"""The project that `te-hal new-backend` writes: its name, its files, and what makes a name bad."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import te_hal
from te_hal.dispatch import list_backends
from te_hal.porting.c_stubs import c_files
from te_hal.porting.python_stubs import FAMILIES, family_module, table_rows
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError

#: Device types of torch that hold no data, or are what another word stands for.
_NO_DEVICES = frozenset({"meta"})
_SUFFIX = ".in"


@dataclass(frozen=True)
class Project:
    """What is to be written.

    Attributes:
        name: of the backend: a lower-case identifier.
        device: torch's type of the devices that it serves.
    """

    name: str
    device: str = "cpu"

    @property
    def package(self) -> str:
        """What is imported."""
        return f"te_hal_{self.name}"

    @property
    def distribution(self) -> str:
        """What is installed, and the name of the folder."""
        return self.package.replace("_", "-")

    def check(self) -> None:
        """Refuse what no backend may be called.

        Raises:
            ArgumentError: the name is no lower-case identifier or a keyword, or a backend or a module has it; the
                device is none.
        """
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name) or self.name.endswith("_"):
            raise _refused(
                "NAME",
                repr(self.name),
                "lower-case letters, digits and underscores, a letter first",
                "choose such a name",
            )
        if keyword.iskeyword(self.name):
            raise _refused("NAME", f"{self.name}, a keyword of Python", "a name that is none", "choose another name")
        taken = sorted(backend.name for backend in list_backends())
        if self.name in taken:
            raise _refused("NAME", f"{self.name}, which is taken", f"any but {', '.join(taken)}", "choose another name")
        if importlib.util.find_spec(self.package) is not None:
            got = f"{self.name}, and a module {self.package} is installed already"
            raise _refused("NAME", got, "a name whose module is free", "choose another name, or uninstall that one")
        if not re.fullmatch(r"[a-z]\w*", self.device) or self.device in _NO_DEVICES:
            accepted = "a device type of torch without an index: cpu, cuda, musa, xpu, ..."
            raise _refused("--device", repr(self.device), accepted, "name the type of the tensors that it will take")


def write_project(project: Project, parent: Path) -> Path:
    """Write every file of a project into a new folder; nothing is left behind if that fails.

    Args:
        project: what to write.
        parent: the folder that the new one goes into.

    Returns:
        The new folder.

    Raises:
        ArgumentError: the name is bad, the parent is no folder or cannot be written to, or there is something of the
            new folder's name.
    """
    project.check()
    target = parent / project.distribution
    if not parent.is_dir():
        raise _refused("--into", str(parent), "a folder that is there", "make it, or name another one")
    if target.exists():
        accepted = "a folder that is not there yet"
        raise _refused("NAME", f"{target}, which exists", accepted, "remove it, or go --into another folder")
    unfinished: Path | None = None
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=f".{project.distribution}.", dir=parent))
        _write(unfinished, project_files(project))
        unfinished.rename(target)
        unfinished = None
    except OSError as error:
        got = f"{parent}: {error.strerror}"
        raise _refused("--into", got, "a folder to write in", "make room, or name another one") from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    # The temporary folder is its maker's alone; a project is not.
    folder.chmod(0o755)


def project_files(project: Project) -> dict[str, str]:
    """The text of every file by its path in the project."""
    words = {
        "NAME": project.name,
        "PACKAGE": project.package,
        "DISTRIBUTION": project.distribution,
        "DEVICE": project.device,
        "DEFAULT_FOR": "frozenset()" if project.device == "cpu" else "frozenset({DEVICE})",
        "TE_HAL": te_hal.__version__,
        "STEMS": ", ".join(sorted(["native", *FAMILIES.values()])),
        "ROWS": table_rows(),
        "UNSUPPORTED": _unsupported(),
    }
    found = {}
    for path, text in _template_files(project):
        named = path.replace("PACKAGE", project.package).replace("NAME", project.name)
        # Hidden files would be left out of a wheel of te_hal.
        found[".gitignore" if named == "gitignore" else named] = _filled(text, words)
    for family, stem in FAMILIES.items():
        found[f"{project.package}/{stem}.py"] = family_module(family)
    for path, text in c_files(project.name).items():
        found[f"csrc/{path}"] = _filled(text, words)
    return found


def _template_files(project: Project) -> list[tuple[str, str]]:
    """Path in the project and text, words not replaced yet; of device_*.py the one that fits."""
    root = Path(str(resources.files("te_hal.porting") / "template"))
    found = []
    for path in sorted(root.rglob(f"*{_SUFFIX}")):
        name = str(path.relative_to(root)).removesuffix(_SUFFIX)
        kind = "host" if project.device == "cpu" else "queued"
        if "device_" in name and f"device_{kind}" not in name:
            continue
        found.append((name.replace(f"device_{kind}", "device"), path.read_text(encoding="utf-8")))
    return found


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def _unsupported() -> str:
    """An entry per op that every backend must have; the others are composed of these."""
    entry = '[[unsupported]]\nop = "{}"\nreason = "not written yet"\n'
    return "\n".join(entry.format(op) for op, schema in SCHEMAS.items() if not schema.optional)


def _refused(what: str, got: str, accepted: str, todo: str) -> ArgumentError:
    return ArgumentError(f"te-hal new-backend: {what}", got=got, accepted=accepted, todo=todo)
