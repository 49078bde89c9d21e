"""What the process has mapped, so that a pointer from a library can be judged before anything follows it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Span(NamedTuple):
    """Addresses from ``first`` up to, without, ``end``, and the permissions as the kernel writes them: ``r-xp``."""

    first: int
    end: int
    permissions: str


def mapped_spans() -> list[Span]:
    """Every mapping of this process, in order of address."""
    spans = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, permissions = line.split()[:2]
        first, end = (int(address, 16) for address in addresses.split("-"))
        spans.append(Span(first, end, permissions))
    return spans


def allows(spans: list[Span], address: int, size: int, permission: str) -> bool:
    """Whether all of ``size`` bytes from ``address`` on are mapped with a permission: ``"r"`` or ``"x"``."""
    end = address + size
    for span in spans:
        if span.first <= address < span.end and permission in span.permissions:
            address = span.end
            if address >= end:
                return True
    return False
