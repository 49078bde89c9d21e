"""Two records of `te-hal bench`: what became slower is flagged, what else differs is said."""

import copy
import json

import pytest

from te_hal.cli.bench_fp8 import pays_from
from te_hal.cli.bench_record import compare_records, read_record
from te_hal.schema.errors import CheckpointError


def row(name, us):
    """A call that took so long, or was refused."""
    base = {"id": name, "op": "amax", "variant": name, "shape": "8x8"}
    if us is None:
        return {**base, "refused": "has no kernel"}
    rate = {"gb_per_s": 1.0, "of_ceiling": 0.5, "runs": "kernel", "timed": 3}
    return {**base, "us": us * 1.5, "least_us": us, **rate}


def record(times, **changed):
    return {
        "kind": "te_hal bench",
        "version": 1,
        "date": "2026-11-30T00:00:00+00:00",
        "backend": "mychip",
        "device": "chip",
        "threads": 1,
        "timed_by": "events",
        "versions": {"torch": "2.7"},
        "size": {"models": ["1B"], "tokens": 8, "quick": True},
        "ceilings": {"copy_gb_per_s": 100.0, "gemm_tflop_per_s": 1.0},
        "rows": [row(name, us) for name, us in times.items()],
        "fp8": None,
        **changed,
    }


BEFORE = {"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0, "e": None, "f": None, "gone": 1.0}
NOW = {"a": 110.0, "b": 111.0, "c": 90.0, "d": None, "e": 5.0, "f": None, "new": 1.0}


def test_slower_and_faster_by_the_least_times_worst_first() -> None:
    found = compare_records(record(NOW), record(BEFORE), 0.1)
    assert [(change.id, change.ratio) for change in found.slower] == [("d", None), ("b", 1.11)]
    assert [(change.id, change.ratio) for change in found.faster] == [("e", None), ("c", 0.9)]
    assert found.unchanged == 2
    assert (found.only_before, found.only_now) == (("gone",), ("new",))
    assert found.circumstances == ()


def test_the_threshold_decides() -> None:
    now, before = record({"a": 130.0}), record({"a": 100.0})
    assert [len(compare_records(now, before, share).slower) for share in (0.0, 0.29, 0.31)] == [1, 1, 0]


def test_other_circumstances_are_said() -> None:
    now = record(NOW, device="another chip", versions={"torch": "2.13"})
    assert compare_records(now, record(BEFORE), 0.1).circumstances == (
        "device: chip before, another chip now",
        "versions: {'torch': '2.7'} before, {'torch': '2.13'} now",
    )


@pytest.fixture
def files(tmp_path):
    for name, content in (("now", record(NOW)), ("before", record(BEFORE))):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return [str(tmp_path / f"{name}.json") for name in ("now", "before")]


def test_the_command_compares_two_records_and_ends_with_1_where_a_call_is_slower(files, command_line) -> None:
    now, before = files
    done = command_line.call("bench", "--from", now, "--against", before)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert "by more than 10%: 2 slower, 2 faster; 2 unchanged, 1 only before, 1 only now" in lines
    assert "  SLOWER  d: 100.0 us before, did not run now" in lines
    assert "  SLOWER  b: 100.0 us before, 111.0 us now, 1.11 x" in lines
    assert command_line.call("bench", "--from", now, "--against", now).exit_code == 0


def test_a_record_is_printed_without_measuring(files, command_line) -> None:
    done = command_line.call("bench", "--from", files[0])
    assert done.exit_code == 0
    assert "backend mychip; chip; 1 threads; torch 2.7; timed by events of the device" in done.stdout
    assert "refused: has no kernel" in done.stdout


HARMED = {
    "no JSON": ("{", "no JSON"),
    "another kind": ("[]", "JSON of something else"),
    "a later version": (json.dumps(record(NOW, version=9)), "version 9"),
    "rows that are none": (json.dumps(record(NOW, rows=[1])), "cut short or altered"),
    "a time below zero": (json.dumps(record({"a": -1.0})), "cut short or altered"),
    "a time that is text": (
        json.dumps(record({}, rows=[row("a", 1) | {"least_us": "fast"}])),
        "altered",
    ),
    "a time without a rate": (
        json.dumps(record({}, rows=[{k: v for k, v in row("a", 1).items() if k != "gb_per_s"}])),
        "cut short or altered",
    ),
    "an op without a name": (
        json.dumps(record({}, rows=[{k: v for k, v in row("a", 1).items() if k != "op"}])),
        "cut short or altered",
    ),
    "no ceilings": (json.dumps(record(NOW, ceilings={})), "cut short or altered"),
    "widths that are none": (
        json.dumps(record(NOW, fp8={"tokens": 8, "rows": [{"width": 1}], "pays_from": {}})),
        "cut short or altered",
    ),
    "no circumstances": (json.dumps({k: v for k, v in record(NOW).items() if k != "device"}), "cut short or altered"),
}


@pytest.mark.parametrize("harm", HARMED)
def test_a_file_that_is_no_record_is_refused(harm, tmp_path, command_line) -> None:
    text, said = HARMED[harm]
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=said):
        read_record(path)
    for option in ("--from", "--against"):
        assert command_line.call("bench", option, str(path)).exit_code == 2


PAYS = {
    "at every width": ([(10, 5), (10, 5)], 1),
    "from the second": ([(10, 15), (10, 5)], 2),
    "not where it is slower again": ([(10, 5), (10, 15), (10, 5)], 3),
    "at none": ([(10, 5), (10, 10)], None),
    "not where the largest is refused": ([(10, 5), (10, None)], None),
    "not where nothing is to be faster than": ([(10, 5), (None, 5)], None),
}


@pytest.mark.parametrize("case", PAYS)
def test_fp8_pays_from_the_width_behind_which_it_is_always_faster(case) -> None:
    times, due = PAYS[case]
    rows = [
        {"width": width, "bf16_us": bf16, "scaled_us": {} if fp8 is None else {"mxfp8": fp8}}
        for width, (bf16, fp8) in enumerate(times, 1)
    ]
    assert pays_from(copy.deepcopy(rows), "mxfp8") == due
