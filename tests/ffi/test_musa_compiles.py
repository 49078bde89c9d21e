"""The nearest that a machine without the SDK comes to mcc: clang 14, which mcc is built from, with stub headers.

What this cannot show: mcc's own defects, the behaviour of its waves, and its handling of subnormal numbers.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from te_hal.ffi.sources import FOLDER, LIBRARY_SOURCES

HERE = Path(__file__).resolve().parent
CLANG = shutil.which("clang++-14")
FILTER = shutil.which("c++filt") or "c++filt"
ARCHITECTURES = (210, 220, 310)
_POSING = ("-x", "cuda", "-nocudainc", "-nocudalib", "-D__MUSACC__", "-D__MUSA__", f"-I{HERE / 'musa_stub'}")
_STRICT = ("-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-cuda-version", "-Wno-unused-function")

pytestmark = pytest.mark.skipif(CLANG is None, reason="no clang++-14")


def compiled(source, *options):
    command = [CLANG, *_POSING, *_STRICT, *options, str(source)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


def undefined_device_names(architecture, folder):
    """Names that the device passes declare and do not define, but for the compiler's own."""
    options = (f"-D__MUSA_ARCH__={architecture}", "--cuda-device-only", "--cuda-gpu-arch=sm_80", "-S", "-emit-llvm")
    mangled = set()
    for source in LIBRARY_SOURCES:
        output = folder / f"{source.stem}.ll"
        compiled(source, *options, "-o", str(output))
        declared = re.findall(r"^declare [^@]*@(\w[\w.]*)\(", output.read_text(encoding="utf-8"), re.MULTILINE)
        mangled |= {name for name in declared if not name.startswith("llvm.")}
    text = "\n".join(mangled)
    return set(subprocess.run([FILTER], input=text, check=True, capture_output=True, text=True).stdout.split("\n"))


def listed_names(architecture):
    lines = (HERE / "musa_device_names.txt").read_text(encoding="utf-8").splitlines()
    names = set()
    for line in lines:
        if line and not line.startswith("#"):
            least, _, name = line.partition(" ") if line[0].isdigit() else ("0", "", line)
            if architecture >= int(least):
                names.add(name)
    return names


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_device_pass_compiles_and_needs_only_listed_names(architecture, tmp_path):
    assert undefined_device_names(architecture, tmp_path) == listed_names(architecture)


@pytest.mark.parametrize("source", LIBRARY_SOURCES, ids=lambda source: source.stem)
def test_the_host_pass_compiles(source, tmp_path):
    compiled(source, "--cuda-host-only", "-fPIC", "-c", "-o", str(tmp_path / "host.o"))


@pytest.mark.parametrize(
    "line",
    ["m = __byte_perm(m, m, 0x3210);", "m = warpSize;", "m = __ldg(&m);", "m = __activemask();", "m = clock();"],
)
def test_a_name_that_only_cuda_has_is_an_error(line, tmp_path):
    source = tmp_path / "cuda_name.mu"
    include = f'#include "{FOLDER / "kernels" / "reduce.muh"}"\n'
    source.write_text(f"{include}static __global__ void kernel(unsigned* p) {{ unsigned m = *p; {line} *p = m; }}\n")

    options = ("-D__MUSA_ARCH__=310", "--cuda-device-only", "--cuda-gpu-arch=sm_80", "-fsyntax-only")
    result = subprocess.run([CLANG, *_POSING, "-std=c++17", *options, str(source)], check=False, capture_output=True)

    assert result.returncode != 0
