"""`te-hal backends`."""

import json
from dataclasses import asdict

import pytest
from stub_backends import stub

import te_hal
from te_hal.dispatch import register_backend
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
    expected = [asdict(backend) for backend in te_hal.list_backends()]
    assert found == json.loads(json.dumps(expected))


def test_an_unusable_backend_is_refused_for_training_with_its_reason(command_line, broken_backend):
    done = command_line.compare("--backend", broken_backend)
    assert done.exit_code == 2
    assert "its board is unplugged" in done.stderr
    assert "cpu_reference (usable)" in done.stderr
    assert not command_line.out.exists()
