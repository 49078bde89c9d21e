"""A library is opened once, and a refusal says which file, which case, and both sides of a mismatch.

Case B101 (python-cffi/cffi#154, #64).
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import native_stub
import pytest

from te_hal.ffi.binding import binding
from te_hal.ffi.loader import open_library
from te_hal.schema.errors import BackendUnavailableError

Stub = Callable[..., Path]

KNOWN, SIZE = int(binding().lib.TE_HAL_ABI_VERSION), int(binding().lib.te_hal_api_size())

# What differs from a right library, and what the refusal must name.
WRONG_TABLES = {
    "too old": ({"VERSION": 0}, ["ABI version 0, which is too old", f"needs 1 to {KNOWN}"]),
    "too new": ({"NEEDED_CALLER": 77, "VERSION": 77}, ["ABI version 77, which is too new", f"knows up to {KNOWN}"]),
    "too new, silent": ({"NEEDED_CALLER": 77, "TABLE": "NULL"}, ["which is too new", "does not tell"]),
    "truncated": ({"SIZE": SIZE - 16}, [f"truncated table: {SIZE - 16} bytes", f"which has {SIZE}"]),
    "only a header": ({"SIZE": 8}, ["truncated table: 8 bytes"]),
    "size too large": ({"SIZE": SIZE + 8}, [f"lies about its size: {SIZE + 8}", f"version {KNOWN} has {SIZE}"]),
    "newer without more": ({"VERSION": KNOWN + 2}, [f"lies about its size: {SIZE} bytes for ABI version {KNOWN + 2}"]),
    "newer and absurd": ({"VERSION": KNOWN + 2, "SIZE": 1 << 30}, ["lies about its size: 1073741824"]),
    "a NULL entry": ({"NULL_amax": 1}, ["entry amax is NULL"]),
    "a NULL string": ({"NULL_compiler": 1}, ["entry compiler is NULL"]),
    "an entry in nowhere": ({"WILD_gemm": 1}, ["entry gemm points to 0x40, where there is no code"]),
    "a string in nowhere": ({"WILD_backend": 1}, ["entry backend points to 0x40, where there is no text"]),
    "a table in nowhere": ({"TABLE": "(const te_hal_api *)16"}, ["a table at 0x10, where nothing can be read"]),
    "data instead of code": ({"VALUE": 1, "SYMBOL": "te_hal_get_apis"}, ["a missing symbol, te_hal_get_api"]),
}


def refusal(path: Path) -> str:
    with pytest.raises(BackendUnavailableError) as caught:
        open_library(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_right_library_tells_what_it_is(stub: Stub) -> None:
    library = open_library(stub(BACKEND='"musa"', ARCHITECTURES='"mp_22,mp_31"'))
    assert (library.backend, library.architectures) == ("musa", ("mp_22", "mp_31"))
    assert (library.version, library.source_hash, library.compiler) == ("0.1.0", "5eed", "gcc stub")


def test_a_library_is_opened_once_under_all_its_names(stub: Stub, tmp_path: Path) -> None:
    path = stub()
    (tmp_path / "link.so").symlink_to(path)
    assert open_library(path) is open_library(tmp_path / "link.so")


def test_a_table_from_a_newer_te_hal_is_accepted(stub: Stub, tmp_path: Path) -> None:
    longer = "struct { te_hal_api now; void *later; } newer = {{TE_HAL_API_SIZE + 8, VERSION}};"
    path = stub(VERSION=KNOWN + 1, SIZE="TE_HAL_API_SIZE + 8")
    code = (tmp_path / "stub.c").read_text()
    code = code.replace("static const te_hal_api table", longer + "\nstatic const te_hal_api table")
    code = code.replace(
        "{ return highest < NEEDED_CALLER",
        "{ newer.now = table; newer.now.struct_size = TE_HAL_API_SIZE + 8; return (te_hal_api *)&newer;",
    )
    code = code[: code.rindex("return (te_hal_api *)&newer;")] + "return (te_hal_api *)&newer; }\n"
    (tmp_path / "newer.c").write_text(code)
    include = native_stub.build_native.HEADER.parent.resolve()
    command = [
        native_stub.COMPILER,
        "-shared",
        "-fPIC",
        "-w",
        f"-I{include}",
        f"-DVERSION={KNOWN + 1}",
        "-o",
        str(path),
    ]
    subprocess.run([*command, str(tmp_path / "newer.c")], check=True)
    assert open_library(path).backend == "host"


@pytest.mark.parametrize(("version", "size"), [(1, 280), (2, 304)])
def test_a_table_of_an_older_version_is_accepted_as_long_as_it_was(version: int, size: int, stub: Stub) -> None:
    assert open_library(stub(VERSION=version, SIZE=size)).backend == "host"


@pytest.mark.parametrize(("version", "size"), [(1, 272), (1, 304), (2, 320)])
def test_a_table_of_an_older_version_has_its_size(version: int, size: int, stub: Stub) -> None:
    assert f"{size} bytes for ABI version {version}" in refusal(stub(VERSION=version, SIZE=size))


def test_a_missing_optional_entry_is_accepted(stub: Stub) -> None:
    assert open_library(stub(NULL_configure_emulator=1)).backend == "host"


@pytest.mark.parametrize("case", WRONG_TABLES)
def test_a_wrong_table_is_refused_and_the_refusal_says_why(case: str, stub: Stub) -> None:
    macros, words = WRONG_TABLES[case]
    text = refusal(stub(**macros))
    assert all(word in text for word in words), text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "libnone.so")


def test_a_folder_is_no_library(tmp_path: Path) -> None:
    assert "no file" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"!<arch>\nnot a library"], ids=["empty", "cut", "archive"])
def test_a_file_that_is_no_library_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "libodd.so"
    path.write_bytes(content)
    assert "no ELF library, or a part of one" in refusal(path)


@pytest.mark.parametrize("kept", [64, 600, 2000, 0.5, -1])
def test_a_library_that_is_cut_short_is_refused(kept: float, stub: Stub) -> None:
    path = stub()
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept == 0.5 else int(kept)])
    text = refusal(path)
    assert "cut short" in text or "a part of one" in text


def test_a_library_for_another_machine_names_both_machines(stub: Stub) -> None:
    path = stub()
    content = bytearray(path.read_bytes())
    own = struct.unpack_from("<H", content, 18)[0]
    struct.pack_into("<H", content, 18, 183 if own != 183 else 62)
    path.write_bytes(content)
    text = refusal(path)
    assert "wrong architecture" in text
    assert "x86-64" in text
    assert "aarch64" in text


def test_a_missing_dependency_is_named_and_told_from_a_missing_file(stub: Stub) -> None:
    dependency = stub("libdependency.so", SYMBOL="needed_by_the_stub")
    path = stub("libdependent.so", libraries=(dependency,), NEEDS="needed_by_the_stub")
    dependency.unlink()
    text = refusal(path)
    assert "a dependency of it missing" in text
    assert "libdependency.so" in text
    assert "LD_LIBRARY_PATH" in text


def test_an_undefined_symbol_is_named(stub: Stub) -> None:
    text = refusal(stub(NEEDS="nobody_defines_this"))
    assert "a missing symbol, nobody_defines_this" in text


def test_a_file_that_cannot_be_read_is_told_from_a_missing_one() -> None:
    # This one opens, for root too, and gives no byte.
    assert "cannot be read" in refusal(Path("/proc/self/mem"))


def test_a_refused_file_is_tried_again(stub: Stub) -> None:
    path = stub(VERSION=0)
    refusal(path)
    path.unlink()
    assert open_library(stub()).backend == "host"
