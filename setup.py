"""Build steps that `pyproject.toml` cannot express; the metadata is all there.

`python setup.py -q egg_info` gives a plain checkout on PYTHONPATH the entry points that backend
discovery reads.

Two things are compiled, and an install succeeds without either where there is no compiler: the binding
(te_hal/ffi/build_native.py), and the kernel library of backend musa_emulator, which goes to te_hal/ffi/lib.
"""

import importlib
import shutil
import sys
import types
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARIES = Path("te_hal", "ffi", "lib")


def builder_of_kernels() -> types.ModuleType:
    """te_hal.ffi.build without te_hal's own imports: torch is not there while a wheel is built."""
    package = types.ModuleType("te_hal")
    package.__path__ = [str(ROOT / "te_hal")]
    sys.modules["te_hal"] = package
    return importlib.import_module("te_hal.ffi.build")


class BuildExtAndKernels(build_ext):
    """Compiles the extensions, then the kernel library for the host."""

    def run(self) -> None:
        """Build; without a C++ compiler say so and go on."""
        super().run()
        target = (ROOT if self.inplace or self.editable_mode else Path(self.build_lib)) / LIBRARIES
        builder = builder_of_kernels()
        try:
            built = builder.build("host", cache=Path(self.build_temp).resolve() / "kernels")
        except builder.BuildError as error:
            self.warn(f"backend musa_emulator will not be usable: {error}")
            return
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(built, target / built.name)


setup(
    cffi_modules=["te_hal/ffi/build_native.py:ffibuilder"],
    cmdclass={"build_ext": BuildExtAndKernels},
    # The binding keeps to the part of Python's ABI that 3.10 and everything after it share.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
