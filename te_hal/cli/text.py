"""The text that `te-hal compare` trains on: where it comes from, what is refused, how it is cut."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from pathlib import Path

#: Values of a byte, which is what the models read and predict.
BYTES = 256

_WHERE = "te-hal compare: --data"
_TODO = "name a plain text file of your own, or leave --data out for the Python documentation topics"
_HELD_OUT_SHARE = 10
# Windows are taken in multiples of 8, as FP8 gemms need.
_FEWEST_HELD_OUT_WINDOWS = 8
_PROMPT = 48
# Control characters that occur in text: backspace, tab, line feed, vertical tab, form feed, return, escape.
_CONTROLS_IN_TEXT = frozenset({8, 9, 10, 11, 12, 13, 27})
# Compressed or random bytes hold 10% of other control characters, UTF-16 about half; text in UTF-8 or an 8-bit
# code page none.
_MOST_CONTROLS = 0.01


@dataclass(frozen=True)
class Text:
    """A text as bytes, cut into a training part and a held-out part.

    Attributes:
        name: what it is, for people.
        sha256: of the whole text, in hexadecimal.
        train: uint8 `[bytes]`, the first nine tenths.
        held_out: uint8 `[bytes]`, the rest; never trained on.
    """

    name: str
    sha256: str
    train: torch.Tensor
    held_out: torch.Tensor

    def held_out_windows(self, length: int, most: int) -> torch.Tensor:
        """Evenly spaced windows of the held-out part: uint8 `[n, length]`, n a multiple of 8 and at most `most`."""
        windows = self.held_out.unfold(0, length, 1)
        count = min(most, len(windows)) // 8 * 8
        return windows[torch.linspace(0, len(windows) - 1, count, dtype=torch.float64).long()]

    def prompt(self, length: int) -> torch.Tensor:
        """The first bytes of the held-out part, for models to go on from: uint8 `[n]`, n from 1 to `length`.

        It ends with a character that is no space: after several, a model may write nothing else.
        """
        start = self.held_out[: min(length, _PROMPT)]
        return start[: max(1, len(bytes(start.tolist()).rstrip()))]

    def unigram_loss(self) -> float:
        """Held-out loss, in nats per byte, of always predicting the training part's byte frequencies."""
        counts = torch.bincount(self.train.long(), minlength=BYTES).double() + 1
        log_frequencies = (counts / counts.sum()).log()
        return -log_frequencies[self.held_out.long()].mean().item()


def load_text(path: Path | None, context: int) -> Text:
    """Read and cut a text.

    Args:
        path: a text file; None for the documentation topics that ship with CPython.
        context: bytes that a prediction looks back on.

    Raises:
        ArgumentError: the file is missing, unreadable, empty, not text, or too short for `context`.
    """
    name, content = _python_topics() if path is None else (str(path), _read(path))
    needed = _HELD_OUT_SHARE * (context + _FEWEST_HELD_OUT_WINDOWS)
    if len(content) < needed:
        raise ArgumentError(
            _WHERE,
            got=f"{name} with {len(content)} bytes",
            accepted=f"at least {needed} bytes (windows of {context + 1}, a tenth of the text held out)",
            todo=_TODO,
        )
    # A copy, because torch wants memory that may be written.
    every_byte = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    split = len(content) - len(content) // _HELD_OUT_SHARE
    return Text(name, hashlib.sha256(content).hexdigest(), every_byte[:split], every_byte[split:])


def _python_topics() -> tuple[str, bytes]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise ArgumentError(
            _WHERE,
            got="no --data, and this Python was installed without its documentation topics (pydoc_data.topics)",
            accepted="a text file",
            todo="name one with --data",
        ) from None
    return "Python documentation topics", "\n".join(topics[key] for key in sorted(topics)).encode()


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArgumentError(
            _WHERE, got=f"{path} ({error.strerror})", accepted="a readable text file", todo=_TODO
        ) from None
    if not content:
        raise ArgumentError(_WHERE, got=f"{path}, which is empty", accepted="a text file", todo=_TODO)
    controls = sum(content.count(code) for code in (*range(32), 127) if code not in _CONTROLS_IN_TEXT)
    if controls > _MOST_CONTROLS * len(content):
        raise ArgumentError(
            _WHERE,
            got=f"{path}, which is not text: {controls / len(content):.0%} of its bytes are control characters",
            accepted="plain text in UTF-8 or an 8-bit encoding (convert UTF-16 first)",
            todo=_TODO,
        )
    return content
