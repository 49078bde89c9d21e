"""What `te-hal new-backend` writes: a stub per op as the schema has it, and nothing where the name is bad."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import native_stub
import pytest
import torch
from command_line import CommandLine

from te_hal.dispatch.signature import check_signature
from te_hal.ffi.binding import binding
from te_hal.ffi.build_native import HEADER, split_table, table_entries, without_preprocessor
from te_hal.ffi.loader import open_library
from te_hal.porting import Project, project, write_project
from te_hal.porting.project import project_files
from te_hal.porting.python_stubs import FAMILIES, family_module, schemas_of
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError

FILES = project_files(Project("mychip"))
CONTRACT = [op for op, schema in SCHEMAS.items() if not schema.optional]


def stubs(family):
    module = {}
    exec(compile(family_module(family), f"{family.value}.py", "exec", dont_inherit=True), module)  # noqa: S102
    return module


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.value)
def test_a_stub_has_the_signature_of_its_op_and_says_that_it_is_none(family):
    module = stubs(family)
    for schema in schemas_of(family):
        function = module[schema.name]
        check_signature("stub", schema, function)
        required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        with pytest.raises(NotImplementedError, match=f"{schema.name} is not written yet"):
            function(**{p.name: None for p in required})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.value)
def test_a_stub_says_what_its_schema_says(family):
    module = stubs(family)
    for schema in schemas_of(family):
        text = " ".join(module[schema.name].__doc__.split())
        sentences = [
            schema.summary,
            schema.contract.reason,
            *schema.contract.rules,
            *(r.sentence for r in schema.rules),
        ]
        sentences += [each.doc for each in (*schema.operands, *schema.flags, *schema.outputs)]
        assert [s for s in sentences if " ".join(s.split()) not in text] == []


def test_every_op_of_the_contract_has_a_row_an_entry_and_a_stub():
    stems = {schema.name: stem for family, stem in FAMILIES.items() for schema in schemas_of(family)}
    for op in CONTRACT:
        assert f'# "{op}": Row({stems[op]}.{op}),' in FILES["te_hal_mychip/table.py"]
        assert f'op = "{op}"\n' in FILES["te_hal_mychip/unsupported.toml"]
        assert f"def {op}(" in FILES[f"te_hal_mychip/{stems[op]}.py"]


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_every_file_is_whole(device):
    files = project_files(Project("other_chip", device))
    assert [path for path, text in files.items() if re.search(r"@[A-Z_]+@", text)] == []
    assert not [path for path, text in files.items() if "mychip" in text or "mychip" in path]
    for path, text in files.items():
        if path.endswith(".py"):
            ast.parse(text)
            assert max(map(len, text.splitlines()), default=0) <= 120, path
    assert f'DEVICE = "{device}"' in files["te_hal_other_chip/device.py"]


def module_of(device, file):
    module = {}
    exec(compile(project_files(Project("mychip", device))[f"te_hal_mychip/{file}"], file, "exec"), module)  # noqa: S102
    return types.SimpleNamespace(**module)


def test_a_device_that_torch_does_not_know_or_see_is_told():
    assert "this torch knows no device nosuch" in module_of("nosuch", "device.py").usable().sentence
    if not torch.xpu.is_available():
        assert "torch.xpu sees no device" in module_of("xpu", "device.py").usable().sentence


def test_a_device_with_streams_gives_the_current_one(monkeypatch):
    runtime = types.SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 1,
        current_stream=lambda device: types.SimpleNamespace(chip_stream=700 + device.index),
        device=contextlib.nullcontext,
    )
    monkeypatch.setattr(torch, "get_device_module", {"chip": runtime}.__getitem__)
    module = module_of("chip", "device.py")
    device = torch.device("cuda:1")
    assert module.usable()
    assert (module.DEVICES.type, module.DEVICES.current(), module.DEVICES.stream(device)) == ("chip", 1, 701)
    with module.DEVICES.enter(device) as entered:
        assert entered == device


def test_every_entry_of_the_header_has_a_function_with_its_parameters():
    _, table = split_table(without_preprocessor(HEADER.read_text()))
    text = " ".join(" ".join(text.split()) for path, text in FILES.items() if path.endswith(".c"))
    entries = [entry for entry in table_entries(table) if entry.parameters is not None]
    for entry in entries[entries.index(next(e for e in entries if e.name == "transpose")) :]:
        assert f"int32_t mychip_{entry.name}({entry.parameters}) {{" in text
        assert f".{entry.name} = mychip_{entry.name}," in FILES["csrc/entries.h"]


def make_library(folder, *, header=HEADER, flags="-O0 -Werror"):
    """Run make lib; whether it had anything to do."""
    library = folder / "te_hal_mychip/lib/libte_hal_mychip.so"
    before = library.stat().st_mtime_ns if library.exists() else 0
    made = subprocess.run(
        ["make", "-s", "lib", f"PYTHON={sys.executable}", f"INCLUDE={header.parent}", f"CFLAGS={flags}"],  # noqa: S607
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return library.stat().st_mtime_ns != before


@pytest.fixture
def folder(tmp_path):
    native_stub.need()
    if shutil.which("make") is None:
        pytest.skip("no make")
    return write_project(Project("mychip"), tmp_path)


def test_the_library_is_made_again_for_another_command_or_header(folder, tmp_path):
    header = Path(shutil.copy(HEADER, tmp_path / "te_hal.h"))
    assert make_library(folder, header=header)
    assert not make_library(folder, header=header)
    assert make_library(folder, header=header, flags="-O0 -Werror -DOTHER='a b'")
    now = (folder / "te_hal_mychip/lib/libte_hal_mychip.so").stat().st_mtime
    os.utime(header, (now + 1, now + 1))
    assert make_library(folder, header=header, flags="-O0 -Werror -DOTHER='a b'")


def test_callers_of_a_shorter_header_are_answered(folder):
    make_library(folder)
    library = open_library(folder / "te_hal_mychip/lib/libte_hal_mychip.so")
    ffi, lib = binding().ffi, binding().lib
    info = ffi.new("te_hal_device_info *", {"struct_size": 12, "wave": 77})
    assert lib.api_device_info(library.api, 0, info) == lib.TE_HAL_OK
    assert (info.struct_size, info.multiprocessors, info.wave, ffi.string(info.name)) == (12, 1, 77, b"")
    info.struct_size = 3
    assert lib.api_device_info(library.api, 0, info) == lib.TE_HAL_INVALID_ARGUMENT
    call = ffi.new("te_hal_call *", {"struct_size": 16, "op": lib.TE_HAL_OP_AMAX, "input_dtype": 99})
    assert lib.api_supports(library.api, call) == lib.TE_HAL_UNSUPPORTED
    call.struct_size = 4
    assert lib.api_supports(library.api, call) == lib.TE_HAL_INVALID_ARGUMENT


def test_the_library_loads_and_supports_nothing(folder):
    make_library(folder)
    library = open_library(folder / "te_hal_mychip/lib/libte_hal_mychip.so")
    ffi, lib = binding().ffi, binding().lib
    assert (library.backend, library.device_count()) == ("mychip", 1)
    for name in dir(lib):
        if name.startswith("TE_HAL_OP_"):
            call = ffi.new(
                "te_hal_call *", {"struct_size": ffi.sizeof("te_hal_call"), "op": getattr(lib, name), "input_dtype": 1}
            )
            assert lib.api_supports(library.api, call) == lib.TE_HAL_UNSUPPORTED
            assert "is not written yet" in library.last_error()
    assert lib.api_amax(library.api, 16, 1, 1, 16, 0, 0, 0, 0) == lib.TE_HAL_UNSUPPORTED
    assert library.last_error() == "amax is not written yet"


BAD = {
    "no_identifier": (Project("my-chip"), "lower-case letters"),
    "a_digit_first": (Project("2chip"), "lower-case letters"),
    "upper_case": (Project("MyChip"), "lower-case letters"),
    "a_path": (Project("../chip"), "lower-case letters"),
    "empty": (Project(""), "lower-case letters"),
    "not_ascii": (Project("chíp"), "lower-case letters"),
    "a_keyword": (Project("class"), "class, a keyword of Python"),
    "a_backend_has_it": (Project("cpu_reference"), "taken"),
    "a_module_has_it": (Project("there"), "installed already"),
    "no_device": (Project("mychip", "my chip"), "device type"),
    "a_device_with_index": (Project("mychip", "cuda:0"), "device type"),
    "a_device_without_data": (Project("mychip", "meta"), "device type"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_name_is_refused_and_nothing_is_written(case, tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "te_hal_there.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    wanted, words = BAD[case]
    with pytest.raises(ArgumentError, match=words):
        write_project(wanted, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "te-hal-mychip").mkdir()
    (tmp_path / "te-hal-mychip" / "work.c").write_text("int work;\n")
    done = CommandLine(tmp_path).call("new-backend", "mychip", "--into", str(tmp_path))
    assert done.exit_code == 2
    assert "te-hal-mychip, which exists" in done.stderr
    assert [path.name for path in (tmp_path / "te-hal-mychip").iterdir()] == ["work.c"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    done = CommandLine(tmp_path).call("new-backend", "mychip", "--into", str(tmp_path / "nowhere"))
    assert (done.exit_code, "nowhere" in done.stderr) == (2, True)


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path, monkeypatch):
    def fill(path, *_, **__):
        raise OSError(28, "No space left on device", str(path))

    files = project.project_files(Project("mychip"))
    monkeypatch.setattr(project, "project_files", lambda _: files)
    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(ArgumentError, match="No space left"):
        write_project(Project("mychip"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_comes_next(tmp_path):
    done = CommandLine(tmp_path).call("new-backend", "mychip", "--into", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    assert f"cd {tmp_path / 'te-hal-mychip'}" in done.stdout
    assert (tmp_path / "te-hal-mychip" / ".gitignore").exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
