"""The entries of te_hal.h as C functions to fill in: signatures and comments are the header's own."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

from te_hal.ffi.build_native import HEADER, split_table

_LIBRARY = "the library"
#: What the first operand of an op may be, where it is not a float.
_INPUTS = {"DEQUANTIZE": "FP8", "GEMM": "FLOATS | FP8", "TRANSPOSE": "FLOATS | FP8"}
_WIDTH = 116
#: Stands for a space that no line is broken at.
_KEPT = "\x01"
_OPS = re.compile(r"^\s*TE_HAL_OP_(\w+)\s*=", flags=re.MULTILINE)
_TOKENS = re.compile(
    r"/\*(?P<comment>.*?)\*/|int32_t \(\*(?P<name>\w+)\)\((?P<parameters>[^)]*)\);|const char \*\w+;",
    flags=re.DOTALL,
)


@dataclass
class _Section:
    """Entries of one file: name, comment and parameters each; ``note`` is what holds for all of them."""

    note: str = ""
    entries: list[tuple[str, str, str]] = field(default_factory=list)


def c_files(name: str) -> dict[str, str]:
    """The text of every family's file, of library.h, and of written.h; library.c comes from the template.

    Args:
        name: of the backend, which every function's name begins with.
    """
    text = HEADER.read_text(encoding="utf-8")
    sections = _sections(text)
    files = {_file(title): _family_file(name, title, section) for title, section in sections.items()}
    entries = [entry for section in sections.values() for entry in section.entries]
    declared = "\n".join(f"{_head(name, entry, parameters)};" for entry, _, parameters in entries)
    files["library.h"] = _LIBRARY_H.format(name=name, guard=name.upper(), declared=declared)
    files["entries.h"] = _ENTRIES_H + "".join(f"    .{entry} = {name}_{entry}, \\\n" for entry, _, _ in entries) + "\n"
    rows = [f"/* OP({op}, {_INPUTS.get(op, 'FLOATS')}) */" for op in _OPS.findall(text)]
    files["written.h"] = _WRITTEN_H.format(rows="\n".join(rows))
    return files


def _sections(header: str) -> dict[str, _Section]:
    _, table = split_table(header)
    found: dict[str, _Section] = {}
    title, comment = _LIBRARY, ""
    for token in _TOKENS.finditer(table):
        if token["comment"] is not None:
            heading = re.match(r"\s*---- (.*?) ----", token["comment"])
            if heading:
                title, comment = heading[1], ""
                found[title] = _Section(textwrap.dedent(token["comment"][heading.end() :]).strip())
            else:
                comment = token["comment"].strip()
        elif token["name"] and title != _LIBRARY:
            found[title].entries.append((token["name"], comment, " ".join(token["parameters"].split())))
    found.pop(_LIBRARY, None)
    return found


def _file(title: str) -> str:
    """Sections are called "cast", "amax and scales", "fused with the cast of the result"."""
    return f"{title.split(maxsplit=1)[0]}.c"


def _family_file(name: str, title: str, section: _Section) -> str:
    head = f'/* {title[0].upper()}{title[1:]}. The comments are those of te_hal.h. */\n#include "library.h"\n'
    note = f"\n/* {section.note} */\n" if section.note else ""
    return head + note + "".join(_function(name, *entry) for entry in section.entries)


def _function(name: str, entry: str, comment: str, parameters: str) -> str:
    body = f'{{\n    return {name}_not_written("{entry}");\n}}\n'
    return f"\n/* {_aligned(comment)} */\n{_head(name, entry, parameters)}\n{body}"


def _aligned(comment: str) -> str:
    """The header's comment without the indentation of the table."""
    first, _, rest = comment.partition("\n")
    return f"{first}\n{textwrap.indent(textwrap.dedent(rest), '   ')}" if rest else first


def _head(name: str, entry: str, parameters: str) -> str:
    """The function's head; a line ends between parameters, not within one."""
    start = f"int32_t {name}_{entry}("
    kept = ", ".join(parameter.replace(" ", _KEPT) for parameter in parameters.split(", "))
    return textwrap.fill(f"{start}{kept})", _WIDTH, subsequent_indent=" " * len(start)).replace(_KEPT, " ")


_LIBRARY_H = """/* What the files of this library share: how an entry fails, and the entries themselves. */
#ifndef {guard}_LIBRARY_H
#define {guard}_LIBRARY_H

#include "te_hal.h"

/* Keeps the sentence for last_error() and gives the status back. */
int32_t {name}_fail(int32_t status, const char *format, ...);

/* What an entry that nobody has written yet returns. */
int32_t {name}_not_written(const char *entry);

{declared}

#endif
"""
_ENTRIES_H = """/* The table's op entries, for library.c. */
#define OP_ENTRIES \\
"""
_WRITTEN_H = """/*
 * What supports() says yes to: an op, and the dtypes of its first operand (FLOATS, FP8, or a sum of FP32, FP16, BF16,
 * E4M3, E5M2). Uncomment a line once its entry is written. Whatever else an entry does not do (a mode, a layout, a
 * copy) is told by limits() in library.c.
 */
{rows}
"""
