"""Compiles tiny kernel libraries for tests of the binding: right ones, and ones with one thing wrong.

Every entry of the table is a C function that notes its arguments and returns STATUS. What differs from a right library
is a macro: ``build(folder, SIZE="264", NULL_amax=1)``. ``calls(path)`` gives what was noted since the last time;
QUIET notes nothing.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from te_hal.ffi import build_native
from te_hal.ffi.binding import binding
from te_hal.schema.errors import BackendUnavailableError

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = shutil.which("gcc") or shutil.which("cc")

_DEFAULTS = {
    "SIZE": "TE_HAL_API_SIZE",
    "VERSION": "TE_HAL_ABI_VERSION",
    "NEEDED_CALLER": "1",
    "BACKEND": '"host"',
    "ARCHITECTURES": '"host"',
    "STATUS": "TE_HAL_OK",
    "DEVICE_STATUS": "TE_HAL_OK",
    "SENTENCE": '"amax: the stub says no"',
    "SYMBOL": "te_hal_get_api",
    "HASH": '"5eed"',
    "MISMATCHES": "0",
    "ENCODER_STATUS": "TE_HAL_OK",
}
_STRINGS = {
    "backend": "BACKEND",
    "architectures": "ARCHITECTURES",
    "version": '"0.1.0"',
    "source_hash": "HASH",
    "compiler": '"gcc stub"',
}
_BODIES = {
    "last_error": "return SENTENCE;",
    "device_count": "*count = 1; return TE_HAL_OK;",
    "check_device": "return device == 0 ? DEVICE_STATUS : TE_HAL_NO_DEVICE;",
    "device_info": "info->architecture = 31; info->wave = 128; return TE_HAL_OK;",
    "workspace_bytes": "return 64;",
}


_ENDINGS = {"select_fp8_encoder": "*mismatches = MISMATCHES; return ENCODER_STATUS;"}
_LOG = """
#include <stdio.h>
#include <string.h>
static char text[1 << 16];
static size_t used;
static void note(const char *format, const char *name, double number, long long integer) {
    int whole = strchr(format, 'l') != NULL;
    used += (size_t)(whole ? snprintf(text + used, sizeof text - used, format, name, integer)
                           : snprintf(text + used, sizeof text - used, format, name, number));
}
const char *stub_log(void) { used = 0; return text; }
void stub_forget(void) { used = 0; text[0] = 0; }
"""


def need() -> None:
    """Skip the test that asks where there is no C compiler or no compiled binding."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    try:
        binding()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def _noted(entry: build_native.Entry) -> str:
    """Statements that write the entry's name and arguments."""
    if entry.parameters in (None, "void"):
        return ""
    lines = [f'note("\\n%s", "{entry.name}", 0, 0);']
    for parameter in entry.parameters.split(", "):
        kind, name = re.fullmatch(r"(.*?)(\w+)", parameter).groups()
        if kind == "double ":
            lines.append(f'note(";%s=%.17g", "{name}", {name}, 0);')
        else:
            lines.append(f'note(";%s=%lld", "{name}", 0, (long long){name});')
    return "\n#ifndef QUIET\n" + " ".join(lines) + "\n#endif\n"


def calls(path: Path) -> list[tuple[str, dict[str, float]]]:
    """The calls that the library at ``path`` has noted, each with its arguments by the header's names; forgets them."""
    library = ctypes.CDLL(str(path))
    library.stub_log.restype = ctypes.c_char_p
    lines = library.stub_log().decode().split("\n")[1:]
    library.stub_forget()
    split = [line.split(";") for line in lines]
    return [(name, {key: float(value) for key, value in (pair.split("=") for pair in pairs)}) for name, *pairs in split]


def source() -> str:
    """The C text. A macro NULL_<entry> takes the entry away, WILD_<entry> lets it point nowhere."""
    _, table = build_native.split_table(build_native.without_preprocessor(build_native.HEADER.read_text()))
    entries = build_native.table_entries(table)
    lines = ['#include "te_hal.h"', *(f"#ifndef {k}\n#define {k} {v}\n#endif" for k, v in _DEFAULTS.items())]
    lines.append(_LOG)
    lines += ["#ifdef NEEDS\nextern int NEEDS(void);\nint use_it(void) { return NEEDS(); }\n#endif"]
    values = []
    for entry in entries:
        if entry.parameters is None:
            value = _STRINGS[entry.name]
        else:
            body = _BODIES.get(entry.name, _noted(entry) + _ENDINGS.get(entry.name, "return STATUS;"))
            lines.append(f"static {entry.result} stub_{entry.name}({entry.parameters}) {{ {body} }}")
            value = f"stub_{entry.name}"
        lines.append(
            f"#if defined NULL_{entry.name}\n#define VALUE_{entry.name} NULL\n#elif defined WILD_{entry.name}\n"
            f"#define VALUE_{entry.name} (void *)64\n#else\n#define VALUE_{entry.name} {value}\n#endif"
        )
        values.append(f".{entry.name} = VALUE_{entry.name}")
    lines.append(f"static const te_hal_api table = {{SIZE, VERSION, {', '.join(values)}}};")
    lines.append("#ifndef TABLE\n#define TABLE &table\n#endif")
    lines.append("const te_hal_api *SYMBOL(uint32_t highest) { return highest < NEEDED_CALLER ? NULL : TABLE; }")
    return "\n".join(lines) + "\n"


def build(folder: Path, name: str = "libstub.so", *, libraries: tuple[Path, ...] = (), **macros: object) -> Path:
    """Compile a library into ``folder``, linked against ``libraries``, with ``macros`` defined."""
    assert COMPILER is not None, "no C compiler"
    code = folder / "stub.c"
    code.write_text(source())
    target = folder / name
    command = [COMPILER, "-shared", "-fPIC", "-w", f"-I{build_native.HEADER.parent.resolve()}", "-o", str(target)]
    command += [f"-D{macro}={value}" for macro, value in macros.items()]
    command += [str(code), *(str(path) for path in libraries)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target
