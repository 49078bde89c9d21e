"""Reads just enough of a shared library's header to say why it must not be given to the loader.

The loader maps what the header promises: of a file that was cut short it touches pages that do not exist, which ends
the process.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"\x7fELF"
_HEADER_BYTES = 64
_SHARED = 3
_MACHINES = {3: "x86", 40: "arm", 62: "x86-64", 183: "aarch64", 243: "riscv", 258: "loongarch"}
#: By the file's class byte: bits of a pointer, the header behind its first 16 bytes, offset and size of a segment.
_LAYOUTS = {
    1: (32, "HHIIIIIHHHHHH", "4xI8xI"),
    2: (64, "HHIQQQIHHHHHH", "8xQ16xQ"),
}
_BYTE_ORDERS = {1: "<", 2: ">"}


class Header(NamedTuple):
    """Of an ELF file: bits of a pointer, number of the machine, kind of file, bytes that it must have."""

    bits: int
    machine: int
    kind: int
    bytes: int

    def __str__(self) -> str:
        return f"{_MACHINES.get(self.machine, f'machine {self.machine}')} ({self.bits} bit)"


def read_header(content: bytes) -> Header | None:
    """The header of an ELF file whose content this is; None if it is none, or ends within its headers."""
    if len(content) < _HEADER_BYTES or not content.startswith(_MAGIC):
        return None
    if content[4] not in _LAYOUTS or content[5] not in _BYTE_ORDERS:
        return None
    order = _BYTE_ORDERS[content[5]]
    bits, fields, segment = _LAYOUTS[content[4]]
    kind, machine, _, _, first_segment, first_section, _, _, segment_bytes, segments, section_bytes, sections, _ = (
        struct.unpack_from(order + fields, content, 16)
    )
    needed = max(first_segment + segments * segment_bytes, first_section + sections * section_bytes)
    if segments and struct.calcsize(order + segment) > segment_bytes:
        return None
    for index in range(segments):
        at = first_segment + index * segment_bytes
        if at + segment_bytes > len(content):
            return None
        offset, size = struct.unpack_from(order + segment, content, at)
        needed = max(needed, offset + size)
    return Header(bits, machine, kind, needed)


def refusal(path: Path, interpreter: Path) -> str:
    """Why the file cannot be a library for the machine that ``interpreter`` runs on; empty if it may be.

    Raises:
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    header, own = read_header(content), read_header(interpreter.read_bytes())
    if header is None:
        return f"a file of {len(content)} bytes that is no ELF library, or a part of one"
    if header.bytes > len(content):
        return f"a library that was cut short: {len(content)} of at least {header.bytes} bytes"
    if own is not None and (header.bits, header.machine) != (own.bits, own.machine):
        return f"a library of the wrong architecture: built for {header}, this Python runs on {own}"
    return "" if header.kind == _SHARED else f"an ELF file of kind {header.kind}, which is no shared library"
