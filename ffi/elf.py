"""Reads just enough of a shared library's header to say why the loader will refuse it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"\x7fELF"
_HEADER_BYTES = {1: 52, 2: 64}
_BYTE_ORDERS = {1: "<", 2: ">"}
_MACHINES = {3: "x86", 40: "arm", 62: "x86-64", 183: "aarch64", 243: "riscv", 258: "loongarch"}
_SHARED = 3


class Header(NamedTuple):
    """Of an ELF file: bits of a pointer, number of the machine, kind of file."""

    bits: int
    machine: int
    kind: int

    def __str__(self) -> str:
        return f"{_MACHINES.get(self.machine, f'machine {self.machine}')} ({self.bits} bit)"


def read_header(path: Path) -> Header | None:
    """The header of an ELF file; None if it is none, or ends within its header."""
    with path.open("rb") as file:
        start = file.read(64)
    if not start.startswith(_MAGIC) or len(start) < _HEADER_BYTES.get(start[4], 64) or start[5] not in _BYTE_ORDERS:
        return None
    kind, machine = struct.unpack_from(f"{_BYTE_ORDERS[start[5]]}HH", start, 16)
    return Header(32 * start[4], machine, kind)


def refusal(path: Path, interpreter: Path) -> str:
    """Why the file cannot be a library for the machine that ``interpreter`` runs on; empty if it may be."""
    header, own = read_header(path), read_header(interpreter)
    if header is None:
        return f"a file of {path.stat().st_size} bytes that is no ELF library, or a part of one"
    if own is not None and (header.bits, header.machine) != (own.bits, own.machine):
        return f"a library of the wrong architecture: built for {header}, this Python runs on {own}"
    return "" if header.kind == _SHARED else f"an ELF file of kind {header.kind}, which is no shared library"
