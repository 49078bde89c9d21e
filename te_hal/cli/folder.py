"""The folder that a comparison writes to: checked before training, with a name for each file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from pathlib import Path

_WHERE = "te-hal compare: --out"


@dataclass(frozen=True)
class OutFolder:
    """Where the files of a comparison lie.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the comparison."""
        return self.path / "compare.ckpt"

    @property
    def earlier_checkpoint(self) -> Path:
        """The checkpoint of the comparison before, kept when a new one starts in the same folder."""
        return self.path / "compare.earlier.ckpt"

    @property
    def record(self) -> Path:
        """Every number, as JSON."""
        return self.path / "compare.json"

    @property
    def plot(self) -> Path:
        """The loss curves."""
        return self.path / "compare.png"


def open_folder(path: Path, *, must_hold_checkpoint: bool = False) -> OutFolder:
    """Make the folder if need be, and see that files can be written there.

    Raises:
        ArgumentError: it cannot be made or written to, or holds no checkpoint where one is needed.
    """
    if must_hold_checkpoint and not OutFolder(path).checkpoint.is_file():
        raise ArgumentError(
            "te-hal compare: --resume",
            got=f"{path}, which holds no {OutFolder(path).checkpoint.name}",
            accepted="the --out folder of a comparison that was stopped",
            todo="name it with --out, or leave --resume out to start",
        )
    trial = path / f".te-hal.{os.getpid()}.trial"
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"\0")
        trial.unlink()
    except OSError as error:
        reason = "a file of that name is in the way" if path.is_file() else error.strerror
        raise ArgumentError(
            _WHERE,
            got=f"{path} ({reason})",
            accepted="a folder that exists or can be made, and written to",
            todo="name another folder with --out",
        ) from None
    return OutFolder(path)
