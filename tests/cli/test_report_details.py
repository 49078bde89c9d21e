"""The tables below the main one, at 80 columns: whatever the number of runs, every name and number is there whole."""

import io

import pytest
from rich.console import Console

from te_hal.cli.report_details import _print_saved
from te_hal.cli.results import Memory, RunResult

#: Of `--from bf16 --fp32 --recipe delayed,current,block,mxfp8,mtfp8`.
RUNS = ["bf16", "bf16-2", "fp32"] + [
    f"{recipe}{one}" for one in (":1", "") for recipe in ("delayed", "current", "block", "mxfp8", "mtfp8")
]


def run(name, number):
    parts = {"layers.0": 1024 * (1_000_000 + number), "layers.10": 1024 * number, "nothing": 0}
    result = RunResult(name, None, steps_planned=1)
    result.memory = Memory(0, 0, sum(parts.values()), 0, parts, 0, "counted")
    return result


@pytest.mark.parametrize("names", [RUNS[:1], RUNS[:4], RUNS], ids=len)
def test_saved_bytes_stay_readable_at_80_columns_with_any_number_of_runs(names):
    console = Console(width=80, file=io.StringIO())
    _print_saved(console, [run(name, number) for number, name in enumerate(names, start=1)])
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert max(len(line) for line in console.file.getvalue().splitlines()) <= 80
    assert [name for line in lines if line[:2] == ["saved", "KiB"] for name in line[2:]] == names
    for part, base in (("layers.0", 1_000_000), ("layers.10", 0)):
        numbers = [cell for line in lines if line[:1] == [part] for cell in line[1:]]
        assert numbers == [f"{base + number:,}" for number in range(1, len(names) + 1)]
    assert ["nothing"] not in [line[:1] for line in lines]


def test_without_a_measurement_there_is_no_table():
    console = Console(width=80, file=io.StringIO())
    _print_saved(console, [RunResult("bf16", None, steps_planned=1)])
    assert console.file.getvalue() == ""
