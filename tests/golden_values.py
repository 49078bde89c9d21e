"""Reads the recorded values of tests/golden; its README.md says what they are.

recorded = golden_values.load("quantizers")
for case in recorded.cases("delayed/"):        # "delayed/bfloat16/e4m3/0.3", ...
    values = recorded.case(case)               # {"x": tensor, "data": tensor, ...}
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

FOLDER = Path(__file__).parent / "golden"


class Golden(Mapping[str, torch.Tensor]):
    """One file: key to tensor. A tensor that several keys share is stored once. Do not write to what you get."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, "pt") as stored:
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 - not a mapping
            alias = json.loads(stored.metadata()["alias"])
        self._tensors = tensors | {key: tensors[holder] for key, holder in alias.items()}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._tensors))

    def __len__(self) -> int:
        return len(self._tensors)

    def cases(self, prefix: str = "") -> list[str]:
        """The paths under ``prefix`` that hold values directly, in order."""
        return sorted({key.rpartition("/")[0] for key in self if key.startswith(prefix)})

    def case(self, path: str) -> dict[str, torch.Tensor]:
        """Everything below ``path``, by the rest of its key."""
        start = path.rstrip("/") + "/"
        return {key[len(start) :]: self[key] for key in self if key.startswith(start)}


@functools.cache
def load(name: str) -> Golden:
    """The file of that name, read once per process."""
    return Golden(FOLDER / f"{name}.safetensors")
