"""The C header: stand-alone, documented, and pinned."""

import ctypes
import re
import subprocess

import native_stub
import pytest
from native_table import HEADER, codes, struct

from te_hal.ffi.sources import FOLDER

TEXT = HEADER.read_text(encoding="utf-8")
TABLE = TEXT[TEXT.index("typedef struct te_hal_api {") : TEXT.index("} te_hal_api;")]
needs_compiler = pytest.mark.skipif(native_stub.COMPILER is None, reason="no C compiler")


def compile_text(tmp_path, text, *options):
    source = tmp_path / "unit.c"
    source.write_text(text, encoding="utf-8")
    command = [native_stub.COMPILER, *options, f"-I{HEADER.parent}", "-c", str(source), "-o", str(tmp_path / "unit.o")]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@needs_compiler
@pytest.mark.parametrize("language", [("-x", "c", "-std=c99"), ("-x", "c", "-std=c17"), ("-x", "c++", "-std=c++17")])
def test_the_header_compiles_alone_without_a_warning(tmp_path, language):
    result = compile_text(tmp_path, '#include "te_hal.h"\n', *language, "-pedantic", "-Wall", "-Wextra", "-Werror")

    assert result.returncode == 0, result.stderr


@needs_compiler
def test_an_entry_added_without_moving_the_pin_is_a_compile_error(tmp_path):
    text = TEXT.replace("} te_hal_api;", "    int32_t (*another)(void);\n} te_hal_api;")

    assert compile_text(tmp_path, text, "-std=c99").returncode != 0


def test_every_entry_has_a_comment_right_in_front_of_it():
    for match in re.finditer(r"^    (?:int32_t|int64_t|const char \*)\s*\(\*(\w+)\)", TABLE, re.MULTILINE):
        before = TABLE[: match.start()].rstrip()
        assert before.endswith("*/"), match.group(1)


def test_only_entries_documented_as_optional_may_be_null(host_library):
    optional = re.findall(r"/\* \(optional\)(?:[^*]|\*(?!/))*\*/\s*int32_t \(\*(\w+)\)", TABLE)

    assert optional == ["configure_emulator"]
    for name in host_library.arity:
        assert getattr(host_library.table, name), name


def test_the_changelog_has_a_line_for_every_version():
    listed = re.findall(r"^\| (\d+) \|", (FOLDER / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert [int(version) for version in listed] == list(range(1, codes()["ABI_VERSION"] + 1))


def test_a_caller_that_knows_no_version_gets_no_table(host_library):
    get = host_library._library.te_hal_get_api

    assert not get(0)
    assert get(1)
    assert get(2**32 - 1)


def test_a_library_describes_itself(host_library):
    table = host_library.table

    assert (table.backend, table.architectures) == (b"host", b"host")
    assert re.fullmatch(rb"[0-9a-f]{16}", table.source_hash)
    assert re.search(rb"\d", table.compiler)
    assert table.abi_version == codes()["ABI_VERSION"]


def test_device_info_writes_no_further_than_the_callers_struct(host_library):
    kind = struct("te_hal_device_info")
    info = kind(struct_size=16, multiprocessors=-7, shared_memory_per_block=-7)

    host_library.configure_emulator(3, 128, -1)
    host_library.device_info(0, ctypes.addressof(info))

    assert (info.multiprocessors, info.wave, info.shared_memory_per_block) == (3, 128, -7)
    info.struct_size = ctypes.sizeof(kind)
    host_library.device_info(0, ctypes.addressof(info))
    assert (info.shared_memory_per_block, info.name) == (28 * 1024, b"host emulation")
