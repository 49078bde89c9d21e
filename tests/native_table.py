"""The table of a kernel library by way of ctypes and the header's own text, independent of the package's binding."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

HEADER = Path(__file__).resolve().parent.parent / "ffi" / "include" / "te_hal.h"
_TYPES = {
    "uintptr_t": ctypes.c_size_t,
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
    "const char *": ctypes.c_char_p,
}
_ENTRY = re.compile(r"^    (?P<result>\w+|const char \*)\s*\(\*(?P<name>\w+)\)\((?P<parameters>[^)]*)\);", re.MULTILINE)
_FIELD = re.compile(r"^ +(?P<type>\w+(?: char \*)?) *(?P<name>\w+)(?:\[(?P<length>\d+)\])?;", re.MULTILINE)


def _text() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)


def _struct_text(name: str) -> str:
    found = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", _text(), re.DOTALL)
    assert found
    return found.group(1)


def parameters() -> dict[str, list[tuple[str, str]]]:
    """(type, name) of every entry's parameters, as the header has them."""
    found = {}
    for match in _ENTRY.finditer(_struct_text("te_hal_api")):
        texts = [" ".join(text.split()) for text in match["parameters"].split(",")]
        found[match["name"]] = [_type_and_name(text) for text in texts if text != "void"]
    return found


def _type_and_name(text: str) -> tuple[str, str]:
    name = re.search(r"\w+$", text)
    assert name
    return text[: name.start()].strip(), name.group()


def codes() -> dict[str, int]:
    """Every enumerator and number that the header defines, by its name without TE_HAL_."""
    pairs = re.findall(r"TE_HAL_(\w+)\s*=\s*(-?\d+)", _text()) + re.findall(r"#define TE_HAL_(\w+) (\d+)\n", _text())
    return {name: int(value) for name, value in pairs}


def _c_type(text: str):
    if "*" in text and text != "const char *":
        return ctypes.c_void_p
    return _TYPES[text]


def struct(name: str) -> type[ctypes.Structure]:
    """A plain struct of the header, as ctypes."""
    fields = []
    for match in _FIELD.finditer(_struct_text(name)):
        kind = _TYPES[match["type"]]
        fields.append((match["name"], kind * int(match["length"]) if match["length"] else kind))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _api_type() -> tuple[type[ctypes.Structure], dict[str, int]]:
    text = _struct_text("te_hal_api")
    known = parameters()
    plain = re.finditer(r"^    (uint32_t|const char \*) ?(\w+);", text, re.MULTILINE)
    fields = [(match.start(), match[2], _TYPES[match[1].strip()]) for match in plain]
    for match in _ENTRY.finditer(text):
        types = [_c_type(kind) for kind, _ in known[match["name"]]]
        fields.append((match.start(), match["name"], ctypes.CFUNCTYPE(_c_type(match["result"]), *types)))
    fields.sort()
    layout = [(name, kind) for _, name, kind in fields]
    return type("te_hal_api", (ctypes.Structure,), {"_fields_": layout}), {n: len(p) for n, p in known.items()}


class KernelError(Exception):
    """A status that is not TE_HAL_OK, by its name, with the library's sentence."""


class Library:
    """A loaded kernel library. Entries are methods that raise KernelError; tensors pass as their addresses."""

    def __init__(self, path: str | Path, version: int = 1) -> None:
        self._library = ctypes.CDLL(str(path))
        api_type, self.arity = _api_type()
        get = self._library.te_hal_get_api
        get.restype, get.argtypes = ctypes.POINTER(api_type), [ctypes.c_uint32]
        self.table = get(version).contents
        assert self.table.struct_size == ctypes.sizeof(api_type)
        self.codes = codes()
        self._status = {v: k for k, v in self.codes.items() if k in _status_names()}

    def last_error(self) -> str:
        return self.table.last_error().decode()

    def call(self, entry: str, *arguments) -> int:
        """The status of an entry; tensors and None are passed as addresses, names of codes as their numbers."""
        return getattr(self.table, entry)(*(self._plain(argument) for argument in arguments))

    def _plain(self, argument):
        if argument is None:
            return 0
        if isinstance(argument, str):
            return self.codes[argument]
        if hasattr(argument, "data_ptr"):
            return argument.data_ptr()
        return argument

    def __getattr__(self, entry: str):
        def method(*arguments) -> int:
            status = self.call(entry, *arguments)
            if status != 0 and entry != "workspace_bytes":
                raise KernelError(self._status.get(status, str(status)), self.last_error())
            return status

        if entry.startswith("_") or entry not in self.arity:
            raise AttributeError(entry)
        return method


def _status_names() -> frozenset[str]:
    found = re.search(r"typedef enum te_hal_status \{(.*?)\}", _text(), re.DOTALL)
    assert found
    return frozenset(re.findall(r"TE_HAL_(\w+)", found.group(1)))
