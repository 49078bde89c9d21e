"""The emulated device: its settings, its use from several threads, and what it refuses."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from host_library import host_library_path
from native_table import KernelError

TESTS = Path(__file__).resolve().parent.parent
AMAX = """
import sys
sys.path.insert(0, {tests!r})
import ctypes, torch
from native_table import Library, struct
library = Library(sys.argv[1])
kind = struct("te_hal_device_info")
info = kind(struct_size=ctypes.sizeof(kind))
library.device_info(0, ctypes.addressof(info))
print(info.multiprocessors, info.wave)
x, found = torch.arange(5000.0), torch.zeros(1)
status = library.call("amax", x, 1, 5000, found, 0, torch.empty(512), 2048, 0)
print(status, found.item(), library.last_error())
"""


def run_with(setting):
    """The lines that a new process prints which loads the library with this TE_HAL_EMULATOR."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AMAX.format(tests=str(TESTS)), str(host_library_path())],
        check=True,
        capture_output=True,
        text=True,
        env=_environment() | ({} if setting is None else {"TE_HAL_EMULATOR": setting}),
    )
    return result.stdout.splitlines()


def _environment():
    return {name: value for name, value in os.environ.items() if name != "TE_HAL_EMULATOR"}


def test_the_environment_sets_the_emulator_at_load():
    assert run_with("wave=128,threads=3,seed=7") == ["3 128", "0 4999.0 "]


@pytest.mark.parametrize("setting", ["wave=64", "threads=-1", "threads", "speed=2", "wave=128,,seed=1", "seed=1x"])
def test_an_environment_that_makes_no_sense_is_reported_by_the_first_launch(setting):
    _, line = run_with(setting)

    assert line.startswith("1 0.0 amax: TE_HAL_EMULATOR is")
    assert f'"{setting}"' in line
    assert "wave=32 or 128" in line


@pytest.mark.parametrize("setting", [(-1, 32, 0), (257, 32, 0), (1, 64, 0), (1, 0, 0)], ids=str)
def test_settings_out_of_range_are_refused(host_library, setting):
    with pytest.raises(KernelError, match="wave 32 or 128"):
        host_library.configure_emulator(*setting)


def test_every_order_gives_the_same_result(host_library):
    x = torch.randn(300, 520)
    seen = set()
    for seed in range(-1, 12):
        for wave in (32, 128):
            host_library.configure_emulator(1 + seed % 3, wave, seed)
            codes = torch.zeros(520, 300, dtype=torch.uint8)
            host_library.quantize(
                *(x, "FLOAT32", 300, 520, torch.ones(1), torch.zeros(1)),
                *(None, codes, 0, None, None, "FLOAT8_E4M3", 0),
            )
            seen.add(codes.numpy().tobytes())

    assert len(seen) == 1


def test_many_threads_launch_at_once(host_library):
    host_library.configure_emulator(2, 32, -1)
    x = torch.arange(20_000, dtype=torch.float32)
    wrong = []

    def work(number):
        for i in range(50):
            found = torch.zeros(1)
            host_library.amax(x[: 100 * (number + 1) + i], "FLOAT32", 100 * (number + 1) + i, found, 0, *workspace())
            if found.item() != 100 * (number + 1) + i - 1:
                wrong.append((number, i, found.item()))

    def workspace():
        return torch.empty(512), 2048, 0

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
