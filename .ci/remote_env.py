"""Prepare a checkout for a machine that has torch but no package index: one folder that travels with it.

Usage: python .ci/remote_env.py [--python 3.12] [--folder .remote] [--build TARGET[:ARCH] ...]

There, in the checkout's root: `. .remote/activate`, and `import te_hal` works, native backends included.

The folder holds cffi for that Python, the binding (one build serves every Python from 3.10 on), the entry points by
which backends are found, and the kernel libraries that were asked for.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ACTIVATE = """\
# Source this in the root of the checkout: . {folder}/activate
export PYTHONPATH="$PWD/{folder}/site:$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
export TE_HAL_LIBRARY_PATH="$PWD/{folder}/lib${{TE_HAL_LIBRARY_PATH:+:$TE_HAL_LIBRARY_PATH}}"
cp -f {folder}/_native.abi3.so te_hal/ffi/
"""


def run(*command: str) -> None:
    """Run a command in the checkout; its failure is ours."""
    subprocess.run(command, check=True, cwd=ROOT)


def unpack_wheel(name: str, python: str, site: Path) -> None:
    """The wheel of a package, in the version that is installed here, for another Python on this kind of machine."""
    machine = platform.machine()
    platforms = [f"--platform={name}_{machine}" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
        run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", f"--dest={scratch}"),
            *options,
            *platforms,
            f"{name}=={version(name)}",
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def write_entry_points(site: Path) -> None:
    """The metadata from which te_hal finds its backends."""
    run(sys.executable, "setup.py", "-q", "egg_info")
    shutil.copytree(ROOT / "te_hal.egg-info", site / "te_hal.egg-info")


def build_library(spec: str, lib: Path) -> None:
    """A kernel library from "cuda:sm_90", "host" or the like."""
    target, _, architecture = spec.partition(":")
    command = [sys.executable, "-m", "te_hal.ffi.build", f"--target={target}"]
    command += [f"--arch={architecture}"] if architecture else []
    built = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    shutil.copy(built, lib)


def main() -> int:
    """Make the folder afresh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python")
    parser.add_argument("--folder", default=".remote", help="what to make, relative to the checkout")
    parser.add_argument("--build", nargs="*", default=["host"], help="kernel libraries: host, cuda:sm_90, musa:mp_31")
    options = parser.parse_args()
    folder = ROOT / options.folder
    shutil.rmtree(folder, ignore_errors=True)
    site, lib = folder / "site", folder / "lib"
    site.mkdir(parents=True)
    lib.mkdir()
    unpack_wheel("cffi", options.python, site)
    write_entry_points(site)
    run(sys.executable, "te_hal/ffi/build_native.py", str(folder))
    for spec in options.build:
        build_library(spec, lib)
    (folder / "activate").write_text(ACTIVATE.format(folder=options.folder))
    print(f"carry {options.folder} along with the checkout; there: . {options.folder}/activate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
