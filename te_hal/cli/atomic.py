"""Files that are either the old ones or the new ones, whole, whatever interrupts the writing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from pathlib import Path


#: Files under way, which a process that ends without unwinding is to remove.
_parts: set[Path] = set()


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` into `path`, on disk before the old file goes.

    Raises:
        OSError: nothing was written; what `path` held is still there.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    _parts.add(part)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        _parts.discard(part)
    _sync_folder(path.parent)


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before minutes of work and not after.

    Raises:
        ArgumentError: a folder, or a file in a folder that is not there.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ArgumentError(option, got=str(path), accepted="a file in a folder that is there", todo="make the folder")


def remove_parts() -> None:
    """Remove what is half written.

    Raises:
        OSError: it could not be removed.
    """
    for part in tuple(_parts):
        part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
