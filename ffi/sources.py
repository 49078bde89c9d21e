"""The kernel libraries' sources: which files there are, their hash, and where built libraries are kept."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

#: The folder of this package; sources lie beside it in a checkout and in an installed package alike.
FOLDER = Path(__file__).resolve().parent

#: What a library is compiled from, each by itself: the table and a unit per family of kernels, which are compiled for
#: the device, and on the host the emulated device.
LIBRARY_SOURCES = (FOLDER / "library" / "library.mu", *sorted((FOLDER / "library" / "units").glob("*.mu")))
EMULATOR_SOURCES = tuple(FOLDER / "emulator" / f"{name}.cpp" for name in ("block", "configuration", "fiber", "launch"))

_FOLDERS = ("include", "kernels", "library", "library/units", "emulator")
_SUFFIXES = frozenset({".h", ".mu", ".muh", ".cpp"})
_HASH_DIGITS = 16


def source_files() -> list[Path]:
    """Every file that a build may read, sorted."""
    return sorted(file for name in _FOLDERS for file in (FOLDER / name).iterdir() if file.suffix in _SUFFIXES)


def source_hash() -> str:
    """16 hexadecimal digits that change whenever a source does. A library built from these sources reports them."""
    digest = hashlib.sha256()
    for file in source_files():
        digest.update(f"{file.relative_to(FOLDER)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:_HASH_DIGITS]


def cache_folder() -> Path:
    """Where built libraries are kept: ``te_hal/kernels`` in the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if root.startswith("/") else Path.home() / ".cache"
    return base / "te_hal" / "kernels"
