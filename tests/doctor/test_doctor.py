"""te-hal doctor: what is here is found, what is faked broken is named with what to do."""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import sys

import native_stub
import pytest
import torch
from command_line import CommandLine
from host_library import host_library_path
from stub_backends import stub

import te_hal
from te_hal.dispatch import discovery, register_backend, selection
from te_hal.doctor import State, diagnose, installation, musa_stack
from te_hal.doctor.native_stack import foreign_checks, native_checks
from te_hal.doctor.symptoms import SYMPTOMS, cure_for
from te_hal.ffi import locations
from te_hal.ffi.devices import HOST
from te_hal.ffi.loader import open_library
from te_hal.ffi.native import _BY_BACKEND, Native
from te_hal.ffi.toolchains import TOOLCHAINS
from te_hal.schema.support import Code, Support


def by_layer(checks):
    return {check.layer: check for check in checks}


def test_a_working_machine_is_healthy_and_says_which_backend_is_selected(tmp_path) -> None:
    done = CommandLine(tmp_path).call("doctor")
    assert done.exit_code == 0, done.stderr
    assert "cpu_reference *: usable" in done.stdout
    assert str(torch.__version__) in done.stdout
    assert te_hal.__version__ in done.stdout
    assert all(backend.name in done.stdout for backend in te_hal.list_backends())


def test_the_json_is_the_same_data(tmp_path) -> None:
    found = json.loads(CommandLine(tmp_path).call("doctor", "--json").stdout)
    assert found == json.loads(json.dumps(diagnose().as_dict()))
    assert found["healthy"] is True


def test_a_selected_backend_that_stopped_working_ends_with_1(tmp_path) -> None:
    state = {"answer": Support()}
    register_backend(stub("board", usable=lambda: state["answer"]))
    te_hal.set_backend("board")
    state["answer"] = Support.no(Code.ENVIRONMENT, "its board is unplugged")
    done = CommandLine(tmp_path).call("doctor")
    assert done.exit_code == 1
    assert "why: its board is unplugged" in done.stdout
    assert "board is selected, and not usable" in done.stdout


def test_a_variable_that_selects_an_unknown_backend_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(selection, "ENVIRONMENT", dataclasses.replace(selection.ENVIRONMENT, backend="abacus"))
    te_hal.reset()
    done = CommandLine(tmp_path).call("doctor")
    assert done.exit_code == 1
    assert "'abacus' is selected by TE_HAL_BACKEND, and there is no such backend" in done.stdout


def test_it_runs_where_nothing_but_torch_is_installed() -> None:
    absent = ("typer", "rich", "matplotlib", "numpy", "cffi", "_cffi_backend", "te_hal.ffi._native")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent})); "
        "import runpy; runpy.run_module('te_hal.doctor', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cpu_reference *: usable" in done.stdout
    assert "musa_emulator: not usable" in done.stdout
    assert "install a C compiler and cffi" in done.stdout


def test_unknown_variables_are_wrong_and_known_ones_are_shown() -> None:
    checks = by_layer(installation.variable_checks({"TE_HAL_BACKEND": "null", "TE_HAL_BAKEND": "x", "PATH": "/bin"}))
    assert checks["TE_HAL_BACKEND"].state is State.NOTE
    assert checks["TE_HAL_BAKEND"].state is State.WRONG
    assert "TE_HAL_BACKEND" in checks["TE_HAL_BAKEND"].todo
    assert "PATH" not in checks


def test_an_old_torch_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    assert by_layer(installation.installation_checks())["torch"].state is State.WRONG


def test_metadata_that_cannot_be_read_is_a_finding_and_no_error(monkeypatch) -> None:
    def broken(*, group):
        raise OSError(group)

    monkeypatch.setattr(discovery.metadata, "entry_points", broken)
    check = by_layer(installation.installation_checks())[f"entry points {discovery.GROUP}"]
    assert (check.state, check.found) == (State.WRONG, "none")


def with_library(monkeypatch, folder):
    environment = dataclasses.replace(locations.ENVIRONMENT, library_path=(str(folder),))
    monkeypatch.setattr(locations, "ENVIRONMENT", environment)


def test_a_library_that_works_is_described(monkeypatch) -> None:
    with_library(monkeypatch, host_library_path().parent)
    check = native_checks("host")[-1]
    assert check.state is State.OK, check
    assert "built by" in check.found


@pytest.mark.parametrize(
    ("harm", "words"), [("text", "no ELF library"), ("machine", "wrong architecture"), ("cut", "cut")]
)
def test_a_library_that_is_none_is_wrong_and_says_what_to_run(monkeypatch, tmp_path, harm, words) -> None:
    content = bytearray(host_library_path().read_bytes())
    if harm == "text":
        content = b"not a library"
    elif harm == "machine":
        content[18:20] = struct.pack("<H", 258)
    else:
        del content[len(content) // 2 :]
    (tmp_path / "libte_hal_host.so").write_bytes(content)
    with_library(monkeypatch, tmp_path)
    check = native_checks("host")[-1]
    assert check.state is State.WRONG
    assert words in check.found
    assert "build-kernels" in check.todo


STUBS = {
    "another ABI": ({"VERSION": 0}, "ABI"),
    "a missing symbol": ({"NEEDS": "nobody_defines_this"}, "nobody_defines_this"),
    "no entry": ({"SYMBOL": "te_hal_get_apis"}, "te_hal_get_api"),
    "another target": ({"BACKEND": '"musa"'}, "a library for musa"),
}


@pytest.mark.parametrize("case", STUBS)
def test_a_library_that_does_not_fit_is_wrong_and_says_how(monkeypatch, tmp_path, case) -> None:
    native_stub.need()
    macros, words = STUBS[case]
    native_stub.build(tmp_path, "libte_hal_host.so", **macros)
    with_library(monkeypatch, tmp_path)
    check = native_checks("host")[-1]
    assert check.state is State.WRONG
    assert words in check.found
    assert check.todo


def test_a_dependency_that_is_missing_is_named(monkeypatch, tmp_path) -> None:
    native_stub.need()
    dependency = native_stub.build(tmp_path, "libdependency.so", SYMBOL="needed_by_the_stub")
    native_stub.build(tmp_path, "libte_hal_host.so", libraries=(dependency,), NEEDS="needed_by_the_stub")
    dependency.unlink()
    with_library(monkeypatch, tmp_path)
    check = native_checks("host")[-1]
    assert "libdependency.so" in check.found
    assert "LD_LIBRARY_PATH" in check.todo


def test_a_machine_without_a_compiler_says_how_to_get_one(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check = native_checks("host")[1]
    assert check.state is State.ABSENT
    assert check.todo


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Nothing of MUSA is here, whatever this machine has; the folder for what a test fakes."""
    for name in ("MUSA_HOME", "MUSA_PATH", "MUSA_INSTALL_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(musa_stack, "_DEVICES", tmp_path)
    monkeypatch.setattr(musa_stack, "_MODULES", tmp_path / "modules")
    monkeypatch.setattr(musa_stack, "_USUAL_SDK", tmp_path / "musa")
    monkeypatch.setattr(musa_stack, "version_of", lambda _: "")
    return tmp_path


@pytest.mark.usefixtures("machine")
def test_a_machine_without_anything_of_musa_has_four_absent_layers_with_advice() -> None:
    assert [check.state for check in musa_stack.musa_checks()] == [State.ABSENT] * 4
    assert all(check.todo for check in musa_stack.musa_checks())


def test_a_whole_stack_is_ok(machine, monkeypatch) -> None:
    (machine / "mtgpu.0").touch()
    (machine / "modules").write_text("mtgpu 1 0 - Live\n")
    (machine / "musa/lib").mkdir(parents=True)
    (machine / "musa/lib/libmusart.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(machine / "musa/lib"))
    monkeypatch.setattr(musa_stack.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(musa_stack, "version_of", lambda _: "2.7.0")
    monkeypatch.setattr(musa_stack, "wanted_torch", lambda: "")
    assert [check.state for check in musa_stack.musa_checks()] == [State.OK] * 4


def test_an_sdk_that_is_named_and_not_there_is_wrong(machine, monkeypatch) -> None:
    monkeypatch.setenv("MUSA_HOME", str(machine / "nowhere"))
    check = by_layer(musa_stack.musa_checks())["MUSA SDK"]
    assert (check.state, str(machine / "nowhere") in check.found) == (State.WRONG, True)


@pytest.mark.usefixtures("machine")
def test_a_torch_musa_for_another_torch_is_wrong_and_names_both(monkeypatch) -> None:
    monkeypatch.setattr(musa_stack, "version_of", lambda _: "1.3.0")
    monkeypatch.setattr(musa_stack.metadata, "requires", lambda _: ["numpy", "torch==2.2.0"])
    check = by_layer(musa_stack.musa_checks())["torch_musa"]
    assert check.state is State.WRONG
    assert "torch 2.2.0" in check.found
    assert "torch 2.2.0" in check.todo


MESSAGES = {
    "musaGetDeviceCount: 801 operation not supported": "IOMMU",
    "libsrv_um_MUSA.so: file too short": "mt-container-toolkit",
    "libmudnn.so.1: cannot open shared object file": "LD_LIBRARY_PATH",
    "libmupti.so.5: cannot open shared object file": "5.2",
    "libmusa_python.so: undefined symbol: _ZN2at": "torch_musa",
    "x.so: undefined symbol: foo": "ldd",
    "unsupported display driver / musa driver combination": "driver",
    "unsupported CUDA gpu architecture: mp_31": "-x musa",
    "error 209 at the first launch": "mp_31",
    "device 0 is mp_21; this library holds mp_22, mp_31": "--arch",
    "cannot find -lmusart": "MUSA_HOME",
    "torch_musa sees no GPU; check the driver": "render",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_known_failure_has_its_cure(message) -> None:
    assert MESSAGES[message] in cure_for(message)


def test_every_symptom_is_shown_by_a_message_here_and_other_words_show_none() -> None:
    assert {cure_for(message) for message in MESSAGES} == {symptom.cure for symptom in SYMPTOMS}
    assert cure_for("its board is unplugged") == ""


@pytest.fixture
def foreign(tmp_path):
    """A native backend of another package, and the file that it looks for."""
    path = tmp_path / "libboard.so"
    native = Native("board", "board", HOST, find=lambda: open_library(path, build="run make lib"))
    yield native, path
    _BY_BACKEND.pop("board")


def test_the_library_of_another_package_is_absent_wrong_or_there(foreign):
    native_stub.need()
    native, path = foreign
    assert foreign_checks(native)[-1].state is State.ABSENT
    path.write_text("not a library")
    check = foreign_checks(native)[-1]
    assert (check.state, check.todo) == (State.WRONG, "run make lib")
    path.unlink()
    native_stub.build(path.parent, path.name)
    check = foreign_checks(native)[-1]
    assert (check.state, str(path) in check.found) == (State.OK, True)


def test_a_backend_of_another_package_with_a_library_is_diagnosed(foreign):
    assert foreign[0].target not in TOOLCHAINS
    register_backend(stub("board"))
    board = next(each for each in diagnose().backends if each.name == "board")
    assert [check.layer for check in board.checks][-1] in {"kernel library of board", "binding te_hal.ffi._native"}
