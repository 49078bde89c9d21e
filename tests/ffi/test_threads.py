"""B102 (python-cffi/cffi#271, #126, #119): the first use of a library comes from several threads at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import native_stub
from host_library import host_library_path

ROOT = Path(__file__).resolve().parent.parent.parent
THREADS, REPEATS = 16, 200

#: In one process: types of cffi are set up, libraries are opened and kernels resolved by whichever thread is first.
PROGRAM = """
import sys, threading, torch
torch.set_num_threads(1)
from pathlib import Path
from te_hal import ops
import te_hal
from te_hal.dispatch import registry
from te_hal.ffi import loader

x, scale = torch.ones(8, 16), torch.ones(1)
failures = []

def first_call(barrier, paths):
    try:
        barrier.wait()
        with te_hal.use_backend("musa_emulator"):
            storage = ops.quantize(x, scale, dtype=torch.float8_e4m3fn)
        assert storage.rowwise_data.eq(0x38).all(), storage.rowwise_data
        assert len({loader.open_library(path) for path in paths}) == len(paths)
    except BaseException as error:
        failures.append(repr(error))

paths = [Path(name) for name in sys.argv[3:]]
for _ in range(int(sys.argv[2])):
    # As if nothing had been found, opened or resolved yet.
    registry.REGISTRY.tables = None
    loader._OPEN.libraries.clear()
    te_hal.reset()
    barrier = threading.Barrier(int(sys.argv[1]))
    threads = [threading.Thread(target=first_call, args=(barrier, paths)) for _ in range(int(sys.argv[1]))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures[:3]
print("done")
"""

#: Each thread its own values and its own error, all over one library.
RESULTS = """
import sys, threading, torch, te_hal
torch.set_num_threads(1)
from te_hal.dispatch import listing
from te_hal.schema.errors import ArgumentError
kernel = listing.find_usable("musa_emulator", "test").kernels
failures = []

def work(number):
    x = torch.full((8, 16), float(number + 1))
    for _ in range(int(sys.argv[2])):
        try:
            assert kernel["amax"](x).item() == number + 1
            try:
                kernel["compute_scale"](x, fp8_max=448.0, epsilon=-1.0 - number)
                failures.append("no error")
            except ArgumentError as error:
                assert f"epsilon is -{number + 1};" in str(error), error
        except BaseException as error:
            failures.append(repr(error))

threads = [threading.Thread(target=work, args=(number,)) for number in range(int(sys.argv[1]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures[:3]
print("done")
"""


def run(program: str, *arguments: str) -> str:
    """What a program prints; it uses the host library built from the sources as they are."""
    native_stub.need()
    library = host_library_path()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TE_HAL_EMULATOR": "threads=1"}
    environment["TE_HAL_LIBRARY_PATH"] = str(library.parent)
    command = [sys.executable, "-X", "faulthandler", "-c", program, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=540)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()


def test_sixteen_threads_make_the_first_call_at_once(tmp_path: Path) -> None:
    paths = [str(native_stub.build(tmp_path, f"lib{i}.so", QUIET=1)) for i in range(2)]
    assert run(PROGRAM, str(THREADS), str(REPEATS), *paths) == "done"


def test_threads_that_call_kernels_at_once_get_their_own_results() -> None:
    assert run(RESULTS, str(THREADS), str(REPEATS)) == "done"
