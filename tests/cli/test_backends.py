"""`te-hal backends`."""

import dataclasses
import json

import pytest
from stub_backends import stub

import te_hal
from te_hal.dispatch import Probed, register_backend, selection
from te_hal.schema.support import Code, Support


@pytest.fixture
def broken_backend():
    register_backend(stub("broken", usable=lambda: Support.no(Code.ENVIRONMENT, "its board is unplugged")))
    return "broken"


def test_every_backend_is_in_the_table(command_line):
    done = command_line.call("backends")
    assert done.exit_code == 0
    for backend in te_hal.list_backends():
        assert backend.name in done.stdout


def test_an_unusable_backend_is_listed_with_its_reason(command_line, broken_backend):
    rows = command_line.call("backends").stdout.splitlines()
    row = next(row for row in rows if broken_backend in row)
    assert " no " in row
    assert "its board is" in row


def test_the_json_has_what_list_backends_answers(command_line):
    found = json.loads(command_line.call("backends", "--json").stdout)
    expected = [dataclasses.asdict(backend) for backend in te_hal.list_backends()]
    assert found == json.loads(json.dumps(expected))


def test_an_unusable_backend_is_refused_for_training_with_its_reason(command_line, broken_backend):
    done = command_line.compare("--backend", broken_backend)
    assert done.exit_code == 2
    assert "its board is unplugged" in done.stderr
    assert not command_line.out.exists()


@pytest.mark.parametrize("by", ["option", "environment"])
def test_an_unknown_backend_is_answered_with_a_short_line_per_backend(command_line, monkeypatch, by):
    long = "its board is unplugged; " * 30
    if by == "environment":
        monkeypatch.setattr(selection, "ENVIRONMENT", dataclasses.replace(selection.ENVIRONMENT, backend="abacus"))
        te_hal.reset()
    register_backend(stub("wordy", usable=lambda: Support.no(Code.ENVIRONMENT, long)))
    done = command_line.compare(*(["--backend", "abacus"] if by == "option" else []))
    assert done.exit_code == 2
    first, *lines = done.stderr.splitlines()
    assert "got backend 'abacus'" in first
    names = [backend.name for backend in te_hal.list_backends() if backend.name != "null"]
    assert [line.split(":")[0].strip() for line in lines] == names
    assert "  cpu_reference: usable" in lines
    assert next(line for line in lines if "wordy" in line).endswith("...")
    assert max(map(len, lines)) <= 80
    assert len(first) < 160


@pytest.mark.parametrize("columns", [30, 60, 71])
def test_a_narrow_terminal_gets_the_backends_below_each_other(command_line, monkeypatch, broken_backend, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = command_line.call("backends").stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "cpu_reference *: usable" in lines
    assert f"{broken_backend}: not usable" in lines
    assert "  its board is unplugged" in lines
    assert sum(len(line) for line in lines) > len(lines) * 15


def test_square_brackets_in_a_reason_are_shown(command_line):
    register_backend(stub("bracketed", usable=lambda: Support.no(Code.ENVIRONMENT, "no [red] lamp")))
    assert "no [red]" in command_line.call("backends").stdout


def test_a_probe_prints_a_line_each_and_ends_with_1_where_one_does_not_load(command_line, monkeypatch):
    found = [Probed("good", True, True, ""), Probed("bad", False, False, "ended its process by SIGSEGV")]
    monkeypatch.setattr("te_hal.cli.backends.probe_backends", lambda timeout: found[: int(timeout)])
    done = command_line.call("backends", "--probe", "--timeout", "2")
    assert (done.exit_code, done.stdout) == (1, "good: usable\nbad: ended its process by SIGSEGV\n")
    done = command_line.call("backends", "--probe", "--timeout", "1", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, [dataclasses.asdict(found[0])])
