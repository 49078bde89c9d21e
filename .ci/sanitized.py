"""Run the kernels' tests on the host library's build with the address and undefined-behaviour sanitizers.

Usage: python .ci/sanitized.py [--every-order] [ARGUMENT_OF_PYTEST ...]

The quick form takes the tests of each entry with threads in sequence; with --every-order the others too, and all that
backends do with the library. A finding ends the process at once, and pytest says in which test.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from host_library import sanitizer_environment  # noqa: E402 - found on the path from here on

from te_hal.ffi.build import build  # noqa: E402 - the same
from te_hal.ffi.toolchains import BuildError  # noqa: E402 - the same

ENTRIES = ("tests/ffi/test_*_kernels.py", "tests/ffi/test_arguments.py")
OTHERS = ("tests/ffi/test_emulator.py", "tests/ffi/test_marshalling.py", "tests/backends/native")


def command(every_order: bool) -> list[str]:
    """What to run, with patterns replaced by the files that there are."""
    patterns = ENTRIES + (OTHERS if every_order else ())
    files = [str(file.relative_to(ROOT)) for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return [sys.executable, "-m", "pytest", *files, *(() if every_order else ("-k", "not random"))]


def main() -> int:
    """The exit status of pytest; 1 if the library cannot be built."""
    arguments = sys.argv[1:]
    every_order = "--every-order" in arguments
    try:
        library = build("host", sanitizer="address")
    except BuildError as error:
        print(error)
        return 1
    print(f"sanitized library: {library}", flush=True)
    # The first is for tests that call the library themselves, the second for the backends.
    chosen = {"KERNEL_TEST_SANITIZER": "address", "TE_HAL_LIBRARY_PATH": str(library.parent)}
    environment = os.environ | sanitizer_environment() | chosen
    rest = [argument for argument in arguments if argument != "--every-order"]
    return subprocess.run([*command(every_order), *rest], check=False, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
