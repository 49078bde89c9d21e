"""The compilers of the three targets: where each is found, and the commands that make a library with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from te_hal.ffi.sources import EMULATOR_SOURCES, LIBRARY_SOURCES
from te_hal.schema.errors import TeHalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Command = list[str]


class BuildError(TeHalError, RuntimeError):
    """A kernel library cannot be built: no compiler, or it failed."""


@dataclass(frozen=True)
class Build:
    """One library to be made.

    Attributes:
        compiler: path of the compiler.
        architectures: what to hold code for.
        sanitizer: "", "address" or "undefined"; host only.
        defines: macros, NAME to value, without quotes.
        folder: where object files and the library go.
    """

    compiler: Path
    architectures: tuple[str, ...]
    sanitizer: str
    defines: dict[str, str]
    folder: Path
    library: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "library", self.folder / "libte_hal_kernels.so")

    def define_flags(self) -> list[str]:
        """``-DNAME="value"`` of every macro."""
        return [f'-D{name}="{value}"' for name, value in self.defines.items()]


@dataclass(frozen=True)
class Toolchain:
    """How one target is built.

    Attributes:
        default_architectures: what a build holds unless told otherwise.
        architecture: pattern of an architecture's name.
        find: the compiler's path; raises BuildError.
        compile: commands that make the objects, independent of each other.
        link: the command that makes the library.
    """

    target: str
    default_architectures: tuple[str, ...]
    architecture: re.Pattern[str]
    find: Callable[[], Path]
    compile: Callable[[Build], list[Command]]
    link: Callable[[Build], Command]


_SHARED_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden")
# No contraction of a product and a sum: every operation is rounded by itself, as the reference does it.
_HOST_FLAGS = (
    *_SHARED_FLAGS,
    "-O3",  # a third faster kernels than -O2, which leaves their short loops as loops
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wno-unknown-pragmas",
    "-U_FORTIFY_SOURCE",  # its check of longjmp takes a switch of stacks for an error
)
_SANITIZED = {
    "": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DTE_FIBER_UCONTEXT", "-g", "-O1"],
    "undefined": ["-fsanitize=undefined", "-fno-sanitize-recover=all", "-DTE_FIBER_UCONTEXT", "-g", "-O1"],
}


def _objects(build: Build, sources: Sequence[Path]) -> list[str]:
    return [str(build.folder / f"{source.stem}.o") for source in sources]


def _compile_each(build: Build, start: Sequence[str], sources: Sequence[Path]) -> list[Command]:
    """A command per source, independent of each other."""
    return [
        [str(build.compiler), *start, *build.define_flags(), "-c", str(source), "-o", object_file]
        for source, object_file in zip(sources, _objects(build, sources), strict=True)
    ]


def _compile_host(build: Build) -> list[Command]:
    start = [*_HOST_FLAGS, *_SANITIZED[build.sanitizer], "-x", "c++"]
    return _compile_each(build, start, (*LIBRARY_SOURCES, *EMULATOR_SOURCES))


def _link_host(build: Build) -> Command:
    objects = _objects(build, (*LIBRARY_SOURCES, *EMULATOR_SOURCES))
    sanitizer = [flag for flag in _SANITIZED[build.sanitizer] if flag.startswith("-fsanitize")]
    # nodelete: its threads and its handlers of fork outlive a dlclose.
    return [
        str(build.compiler),
        "-shared",
        *sanitizer,
        *objects,
        "-Wl,-z,nodelete",
        "-pthread",
        "-o",
        str(build.library),
    ]


def _compile_cuda(build: Build) -> list[Command]:
    codes = []
    for architecture in build.architectures:
        number = architecture.removeprefix("sm_")
        codes += ["-gencode", f"arch=compute_{number},code=[sm_{number},compute_{number}]"]
    flags = ["-x", "cu", "-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden", *codes]
    return _compile_each(build, flags, LIBRARY_SOURCES)


def _link_cuda(build: Build) -> Command:
    objects = _objects(build, LIBRARY_SOURCES)
    return [str(build.compiler), "-shared", "-cudart", "static", *objects, "-o", str(build.library)]


def _compile_musa(build: Build) -> list[Command]:
    codes = [f"--offload-arch={architecture}" for architecture in build.architectures]
    flags = ["-x", "musa", *_SHARED_FLAGS, "-O3", "-ffp-contract=off", "-fno-strict-aliasing", *codes]
    return _compile_each(build, flags, LIBRARY_SOURCES)


def _link_musa(build: Build) -> Command:
    libraries = build.compiler.parent.parent / "lib"
    objects = _objects(build, LIBRARY_SOURCES)
    linker = str(_find_host_compiler())
    return [
        linker,
        "-shared",
        *objects,
        f"-L{libraries}",
        "-lmusart",
        f"-Wl,-rpath,{libraries}",
        "-o",
        str(build.library),
    ]


def _find_host_compiler() -> Path:
    named = os.environ.get("CXX", "")
    tried = [named] if named else ["g++", "c++", "clang++"]
    for name in tried:
        found = shutil.which(name)
        if found:
            return Path(found)
    raise BuildError(
        "build-kernels (host)",
        got=f"no C++ compiler; tried {', '.join(tried)}",
        accepted="a compiler for C++17, named by CXX or found on PATH as g++, c++ or clang++",
        todo="install one (Debian, Ubuntu: apt install g++)",
    )


def _find_in_sdk(target: str, variables: tuple[str, ...], program: str, usual: str) -> Path:
    """The compiler in the SDK that a variable names, else on PATH, else in the usual place."""
    for variable in variables:
        home = os.environ.get(variable)
        if home:
            compiler = Path(home) / "bin" / program
            if compiler.is_file():
                return compiler
            raise BuildError(
                f"build-kernels ({target})",
                got=f"{variable}={home}, where there is no bin/{program}",
                accepted=f"the folder of an SDK that has bin/{program}",
                todo=f"correct {variable}, or unset it to look on PATH and in {usual}",
            )
    found = shutil.which(program)
    compiler = Path(found) if found else Path(usual) / "bin" / program
    if compiler.is_file():
        return compiler
    raise BuildError(
        f"build-kernels ({target})",
        got=f"no {program}: not on PATH, not in {usual}/bin, and {' and '.join(variables)} not set",
        accepted=f"an installed SDK with {program}",
        todo=f"install it, or point {variables[0]} at it",
    )


def compiler_name(compiler: Path) -> str:
    """Name and version of a compiler, in one line, as the library reports it."""
    result = subprocess.run([compiler, "--version"], check=False, capture_output=True, text=True)  # noqa: S603 - found above
    lines = [line.strip() for line in result.stdout.splitlines() if re.search(r"\d\.\d", line)]
    return (lines[0] if lines else compiler.name).replace('"', "'")


TOOLCHAINS = {
    toolchain.target: toolchain
    for toolchain in (
        Toolchain("host", ("host",), re.compile("host"), _find_host_compiler, _compile_host, _link_host),
        Toolchain(
            "cuda",
            ("sm_80", "sm_90"),
            re.compile(r"sm_\d{2,3}"),
            lambda: _find_in_sdk("cuda", ("CUDA_HOME", "CUDA_PATH"), "nvcc", "/usr/local/cuda"),
            _compile_cuda,
            _link_cuda,
        ),
        Toolchain(
            "musa",
            ("mp_21", "mp_22", "mp_31"),
            re.compile(r"mp_\d{2}"),
            lambda: _find_in_sdk("musa", ("MUSA_HOME", "MUSA_PATH", "MUSA_INSTALL_PATH"), "mcc", "/usr/local/musa"),
            _compile_musa,
            _link_musa,
        ),
    )
}
