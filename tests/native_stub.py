"""Compiles tiny kernel libraries for tests of the binding: right ones, and ones with one thing wrong.

Every entry of the table is a C function that does nothing and returns STATUS. What differs from a right library is a
macro: ``build(folder, SIZE="264", NULL_amax=1)``.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from te_hal.ffi import build_native

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
}
_STRINGS = {
    "backend": "BACKEND",
    "architectures": "ARCHITECTURES",
    "version": '"0.1.0"',
    "source_hash": '"5eed"',
    "compiler": '"gcc stub"',
}
_BODIES = {
    "last_error": "return SENTENCE;",
    "device_count": "*count = 1; return TE_HAL_OK;",
    "check_device": "return device == 0 ? DEVICE_STATUS : TE_HAL_NO_DEVICE;",
    "device_info": "info->architecture = 31; info->wave = 128; return TE_HAL_OK;",
    "workspace_bytes": "return 64;",
}


def source() -> str:
    """The C text. A macro NULL_<entry> takes the entry away, WILD_<entry> lets it point nowhere."""
    _, table = build_native.split_table(build_native.without_preprocessor(build_native.HEADER.read_text()))
    entries = build_native.table_entries(table)
    lines = ['#include "te_hal.h"', *(f"#ifndef {k}\n#define {k} {v}\n#endif" for k, v in _DEFAULTS.items())]
    lines += ["#ifdef NEEDS\nextern int NEEDS(void);\nint use_it(void) { return NEEDS(); }\n#endif"]
    values = []
    for entry in entries:
        if entry.parameters is None:
            value = _STRINGS[entry.name]
        else:
            body = _BODIES.get(entry.name, "return STATUS;")
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
