"""Building kernel libraries: where they land, and what a failure says."""

import os
import stat
import time

import pytest

from te_hal.ffi import sources
from te_hal.ffi.build import build, library_path, main
from te_hal.ffi.toolchains import TOOLCHAINS, BuildError

#: A stand-in for a compiler: the file behind -o is made, empty.
WRITES_ITS_OUTPUT = 'for a; do case $last in -o) : > "$a";; esac; last=$a; done'


@pytest.fixture
def no_sdk(monkeypatch):
    for name in ("MUSA_HOME", "MUSA_PATH", "MUSA_INSTALL_PATH", "CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def quick_compiler(monkeypatch, tmp_path):
    """Makes empty files; the real one takes half a minute for the library."""
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin" / "cxx", WRITES_ITS_OUTPUT)))


@pytest.mark.usefixtures("quick_compiler")
def test_a_built_library_is_found_again(tmp_path):
    path = build("host", cache=tmp_path)
    before = path.stat().st_mtime_ns

    assert path == library_path("host", cache=tmp_path)
    assert build("host", cache=tmp_path).stat().st_mtime_ns == before
    assert [file.name for file in path.parent.iterdir() if file.name.startswith("building")] == []


def test_the_path_names_target_architectures_sanitizer_and_the_sources(tmp_path):
    digest = sources.source_hash()

    assert library_path("host", cache=tmp_path).parent.name == f"host-{digest}"
    assert library_path("musa", ["mp_31"], cache=tmp_path).parent.name == f"musa-mp_31-{digest}"
    assert library_path("host", sanitizer="address", cache=tmp_path).parent.name == f"host-address-{digest}"


def test_an_edited_source_is_a_new_library(monkeypatch, tmp_path):
    before = library_path("host", cache=tmp_path)
    monkeypatch.setattr(sources, "source_files", lambda: sources.FOLDER.glob("include/*.h"))

    assert library_path("host", cache=tmp_path) != before


def test_the_cache_follows_xdg_and_falls_back_to_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_folder() == tmp_path / "te_hal" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert sources.cache_folder() == tmp_path / "home" / ".cache" / "te_hal" / "kernels"


@pytest.mark.usefixtures("no_sdk")
@pytest.mark.parametrize(
    ("target", "program", "variable"), [("musa", "mcc", "MUSA_HOME"), ("cuda", "nvcc", "CUDA_HOME")]
)
def test_a_missing_compiler_is_named_with_its_variable(monkeypatch, tmp_path, target, program, variable):
    monkeypatch.setattr("te_hal.ffi.toolchains.Path.is_file", lambda _: False)

    with pytest.raises(BuildError) as caught:
        build(target, cache=tmp_path)

    for part in (f"no {program}", "not on PATH", variable):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("target", "program", "variable"), [("musa", "mcc", "MUSA_HOME"), ("cuda", "nvcc", "CUDA_HOME")]
)
def test_a_variable_that_points_nowhere_is_named_and_not_passed_over(monkeypatch, tmp_path, target, program, variable):
    monkeypatch.setenv(variable, str(tmp_path / "nothing"))

    with pytest.raises(BuildError, match=f"{variable}=.*no bin/{program}"):
        build(target, cache=tmp_path)


@pytest.mark.usefixtures("no_sdk")
def test_no_host_compiler_is_named(tmp_path):
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build("host", cache=tmp_path)


def test_a_failing_compile_shows_the_last_lines_and_the_log(monkeypatch, tmp_path):
    compiler = script(tmp_path / "sdk" / "bin" / "mcc", 'for i in $(seq 40); do echo "line $i"; done; exit 3')
    monkeypatch.setenv("MUSA_HOME", str(compiler.parent.parent))

    with pytest.raises(BuildError) as caught:
        build("musa", ["mp_31"], cache=tmp_path / "cache")

    text = str(caught.value)
    log = next((tmp_path / "cache").rglob("build.log"))
    assert "status 3" in text
    assert "line 40" in text
    assert "line 9\n" not in text
    assert str(log) in text
    assert "--offload-arch=mp_31" in log.read_text(encoding="utf-8")
    assert not list((tmp_path / "cache").rglob("building-*"))


def test_the_first_failing_compile_ends_the_others(monkeypatch, tmp_path):
    """One source has an error; all others would take ten minutes."""
    compiler = script(tmp_path / "cxx", 'case "$*" in *gemm.mu*) echo "no such type"; exit 1;; *-c*) sleep 600;; esac')
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    start = time.monotonic()

    with pytest.raises(BuildError, match="no such type"):
        build("host", cache=tmp_path / "cache")

    assert time.monotonic() - start < 60


def test_mcc_is_called_as_the_sdk_wants_it(monkeypatch, tmp_path):
    compiler = script(tmp_path / "sdk" / "bin" / "mcc", f'echo "$@" >> {tmp_path}/calls; {WRITES_ITS_OUTPUT}')
    linker = script(tmp_path / "bin" / "cxx", f'echo "$@" >> {tmp_path}/links; {WRITES_ITS_OUTPUT}')
    monkeypatch.setenv("MUSA_HOME", str(compiler.parent.parent))
    monkeypatch.setenv("CXX", str(linker))

    build("musa", ["mp_22", "mp_31"], cache=tmp_path / "cache")

    call = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()[-1]
    assert "-x musa" in call
    assert "--offload-arch=mp_22 --offload-arch=mp_31" in call
    assert "-ffast-math" not in call
    assert call.count("-std=") == 1
    for refused in ("-Xcompiler", "-ccbin", "-gencode", "--expt-relaxed-constexpr"):
        assert refused not in call
    link = (tmp_path / "links").read_text(encoding="utf-8")
    assert f"-L{tmp_path}/sdk/lib -lmusart" in link


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("vulkan", ()), "vulkan"),
        (("musa", ("sm_90",)), "sm_90"),
        (("cuda", ("mp_31",)), "mp_31"),
        (("cuda", ("sm_90; rm",)), "sm_90; rm"),
    ],
)
def test_an_unknown_target_or_architecture_is_refused(arguments, named):
    with pytest.raises(BuildError) as caught:
        library_path(*arguments)

    assert named in str(caught.value)


def test_a_sanitizer_is_for_the_host_alone():
    with pytest.raises(BuildError, match="sanitizer"):
        library_path("cuda", sanitizer="address")


@pytest.mark.usefixtures("quick_compiler")
def test_the_command_prints_the_path_or_the_reason(capsys, monkeypatch, tmp_path):
    assert main(["--cache", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(library_path("host", cache=tmp_path))

    monkeypatch.setenv("MUSA_HOME", str(tmp_path))
    assert main(["--target", "musa"]) == 1
    assert "MUSA_HOME" in capsys.readouterr().err


def test_every_toolchain_has_defaults_that_it_accepts():
    for toolchain in TOOLCHAINS.values():
        assert all(toolchain.architecture.fullmatch(name) for name in toolchain.default_architectures)


def test_every_source_is_hashed():
    suffixes = {file.suffix for file in sources.source_files()}
    on_disk = {
        file
        for folder in ("include", "kernels", "library", "emulator")
        for file in (sources.FOLDER / folder).rglob("*")
        if file.suffix in suffixes
    }

    assert set(sources.source_files()) == on_disk
    assert {*sources.LIBRARY_SOURCES, *sources.EMULATOR_SOURCES} <= on_disk
