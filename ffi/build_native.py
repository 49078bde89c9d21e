"""Builds `te_hal.ffi._native`: the header's declarations for Python, and a trampoline for each entry of the table.

Everything is read from `include/te_hal.h`, so an entry that is added there needs no line here. A trampoline takes the
table first, tests whether it has the entry, and calls it; any library can thus be used without compiling again, and an
address is a plain integer on the Python side.

setuptools runs this file by itself (`cffi_modules` in setup.py), without the package, and so does

    python te_hal/ffi/build_native.py [FOLDER]

which compiles the extension beside this file, or into FOLDER.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from cffi import FFI

HERE = Path(__file__).parent
HEADER = HERE / "include" / "te_hal.h"
ADDED = HERE / "csrc" / "binding.h"

# What binding.h has for Python.
_ADDED_DECLARATIONS = """
#define TE_HAL_MISSING_ENTRY -1
const te_hal_api *te_hal_closed(void);
int32_t te_hal_api_size(void);
void *te_hal_open_library(const char *path, char *text, int32_t size);
void te_hal_close_library(void *library);
uintptr_t te_hal_find_symbol(void *library, const char *name);
const te_hal_api *te_hal_ask_for_table(uintptr_t get_api, uint32_t highest_abi_version);
const char *te_hal_entry_names(void);
"""


class Entry(NamedTuple):
    """A pointer of the table. ``parameters`` is None for a string."""

    name: str
    result: str
    parameters: str | None
    optional: bool


def without_preprocessor(text: str) -> str:
    """The header's declarations: no preprocessor lines, nothing that only C++ sees, no compile-time checks."""
    text = text.replace("\\\n", " ")
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"^typedef char \w+\[.*$", "", text, flags=re.MULTILINE)


def split_table(text: str) -> tuple[str, str]:
    """The declarations with the table as an opaque type, and the table's own text."""
    match = re.search(r"typedef struct te_hal_api \{(.*?)\n\} te_hal_api;", text, flags=re.DOTALL)
    if match is None:
        message = f"{HEADER}: no `typedef struct te_hal_api {{ ... }} te_hal_api;`"
        raise ValueError(message)
    opaque = text[: match.start()] + "typedef struct te_hal_api te_hal_api;" + text[match.end() :]
    return opaque, match[1]


def table_entries(table: str) -> list[Entry]:
    """The pointers of the table, in order. An entry whose comment begins with (optional) may be NULL."""
    pattern = re.compile(
        r"/\*(?P<comment>.*?)\*/|(?P<result>(?:const )?\w+ \*?)\(\*(?P<name>\w+)\)\((?P<parameters>[^)]*)\);"
        r"|const char \*(?P<string>\w+);",
        flags=re.DOTALL,
    )
    entries, optional = [], False
    for match in pattern.finditer(table):
        if match["comment"] is not None:
            optional = match["comment"].lstrip().startswith("(optional)")
        elif match["string"]:
            entries.append(Entry(match["string"], "const char *", None, optional=False))
        else:
            parameters = " ".join(match["parameters"].split())
            entries.append(Entry(match["name"], match["result"].strip(), parameters, optional))
            optional = False
    return entries


def declaration(entry: Entry) -> str:
    """The trampoline's C declaration, without the semicolon."""
    given = "" if entry.parameters in (None, "void") else f", {entry.parameters}"
    return f"{entry.result} api_{entry.name}(const te_hal_api *api{given})"


def trampoline(entry: Entry) -> str:
    """The trampoline's C text. ``api_backend(api)`` reads a string, ``api_amax(api, ...)`` calls an entry."""
    if entry.parameters is None:
        value = f"api->{entry.name}"
    else:
        names = re.findall(r"(\w+)(?:,|$)", "" if entry.parameters == "void" else entry.parameters)
        value = f"api->{entry.name}({', '.join(names)})"
    missing = '""' if entry.result.startswith("const char") else "TE_HAL_MISSING_ENTRY"
    return f"static {declaration(entry)} {{\n    return TE_HAL_HAS(api, {entry.name}) ? {value} : {missing};\n}}\n"


def make_builder(include: Path = HEADER.parent) -> FFI:
    """The cffi builder. ``include``: where the compiler finds the header; relative where setuptools wants it so."""
    text = HEADER.read_text(encoding="utf-8")
    declarations, table = split_table(without_preprocessor(text))
    entries = table_entries(table)
    version = re.search(r"^#define TE_HAL_ABI_VERSION (\d+)", text, flags=re.MULTILINE)
    if version is None or not entries:
        message = f"{HEADER}: no TE_HAL_ABI_VERSION, or no entries in the table"
        raise ValueError(message)
    declarations = re.sub(r"const te_hal_api \*te_hal_get_api\(uint32_t highest_abi_version\);", "", declarations)
    names = ",".join(entry.name + ("?" if entry.optional else "") for entry in entries)
    builder = FFI()
    builder.cdef(
        f"#define TE_HAL_ABI_VERSION {version[1]}\n{declarations}{_ADDED_DECLARATIONS}"
        + "".join(f"{declaration(entry)};\n" for entry in entries)
    )
    builder.set_source(
        "te_hal.ffi._native",
        ADDED.read_text(encoding="utf-8")
        + f'static const char *te_hal_entry_names(void) {{ return "{names}"; }}\n'
        + "".join(trampoline(entry) for entry in entries),
        include_dirs=[str(include)],
        depends=[str(HEADER), str(ADDED), str(HERE / "build_native.py")],
        libraries=["dl"],
        extra_compile_args=["-O2"],
        py_limited_api=True,
        # Without a compiler the install succeeds, and the native backends say why they cannot be used.
        optional=True,
    )
    return builder


def compile_into(folder: Path) -> Path:
    """Compile the extension for this Python into ``folder``; the file's path."""
    with tempfile.TemporaryDirectory() as scratch:
        builder = make_builder(HEADER.parent.resolve())
        built = Path(builder.compile(tmpdir=scratch, verbose=False))
        return Path(shutil.copy(built, folder / built.name))


if __name__ in ("__main__", "__cffi__"):
    ffibuilder = make_builder()
if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    sys.stdout.write(f"{compile_into(target)}\n")
