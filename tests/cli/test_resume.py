"""A comparison that was stopped goes on in a new process as if it had not been, or is refused."""

import dataclasses
import errno
import json
import os
import re
import signal
from pathlib import Path

import pytest

import te_hal
from te_hal.cli.text import load_text
from te_hal.dispatch import register_backend

SERIES = ("loss", "gradient_norm", "learning_rate", "held_out")


def numbers(record):
    """All of a record that does not depend on the clock."""
    return [{"name": run["name"], **{key: run[key] for key in SERIES}} for run in record["runs"]]


def test_ten_steps_are_five_and_five_in_a_new_process(command_line):
    """Stopped in the middle of the first recipe's run, then, in the new process, of the second's."""
    command_line.compare()
    straight = numbers(command_line.record())
    for path in command_line.out.iterdir():
        path.unlink()
    stopped = command_line.compare("--stop-after", "25").stdout
    assert "5/10" in stopped
    assert command_line.record()["finished"] is False
    stopped = command_line.finish("--resume", "--stop-after", "10")
    assert "5/10" in stopped
    assert command_line.record()["finished"] is False
    assert command_line.compare("--resume").exit_code == 0
    # As text: a bit of difference in a float is a digit of difference there.
    assert json.dumps(numbers(command_line.record())) == json.dumps(straight)


def test_a_finished_comparison_resumes_to_the_same_report(command_line):
    command_line.compare("--steps", "2")
    first = command_line.record()
    result = command_line.compare("--steps", "2", "--resume")
    assert result.exit_code == 0
    assert command_line.record()["runs"] == first["runs"]


@pytest.fixture
def twin_backend():
    register_backend(dataclasses.replace(te_hal.get_backend(), name="twin", default_for=frozenset()))


@pytest.fixture
def stopped(command_line):
    command_line.compare("--stop-after", "3")
    return command_line


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--width", "48"], "width 32 (now 48)"),
        (["--recipe", "current"], "recipes delayed,current (now current)"),
        (["--seed", "1", "--lr", "0.1"], "lr 0.003 (now 0.1); seed 0 (now 1)"),
        (["--backend", "twin"], "backend cpu_reference (now twin)"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("twin_backend")
def test_another_configuration_is_refused_and_the_checkpoint_kept(stopped, options, difference):
    before = (stopped.out / "compare.ckpt").read_bytes()
    result = stopped.compare("--resume", *options)
    assert result.exit_code == 2
    assert difference in result.stderr
    assert (stopped.out / "compare.ckpt").read_bytes() == before


def test_another_text_is_refused(stopped, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("to be or not to be, that is the question. " * 50)
    result = stopped.compare("--resume", "--data", str(text))
    assert result.exit_code == 2
    assert f"(now {text} (sha256 " in result.stderr


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_damaged_checkpoint_is_refused_and_kept(stopped, damage):
    path = stopped.out / "compare.ckpt"
    content = path.read_bytes()
    content = content[:-100] if damage == "truncated" else content[:-100] + b"?" + content[-99:]
    path.write_bytes(content)
    result = stopped.compare("--resume")
    assert result.exit_code == 2
    assert ("cut short" if damage == "truncated" else "altered") in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert path.read_bytes() == content


def test_a_checkpoint_that_cannot_be_read_is_refused_in_one_message(stopped, monkeypatch):
    def unreadable(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "read_bytes", unreadable)
    monkeypatch.setattr("te_hal.cli.session.load_text", lambda _path, context: load_text(None, context))
    result = stopped.compare("--resume")
    assert result.exit_code == 2
    assert f"{stopped.out / 'compare.ckpt'}: got a file that cannot be read (Input/output error)" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_another_machine_is_told_but_not_refused(stopped, monkeypatch):
    monkeypatch.setattr("te_hal.cli.place.device_name", lambda _: "another processor")
    result = stopped.compare("--resume", "--stop-after", "1")
    assert result.exit_code == 0
    assert re.search(r"device was .*, is another processor: the numbers may differ", result.stderr)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_in_the_middle_leaves_a_report_and_a_usable_checkpoint(command_line, number, code):
    many = ("--steps", "5000")
    process = command_line.start(*many)
    for line in process.stderr:
        if "step" in line and "loss" in line:
            break
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "stopping after this step" in errors
    assert "Traceback" not in errors
    done = int(re.search(r"(\d+)/5000", output)[1])
    assert len(command_line.record()["runs"][0]["loss"]) == done
    assert "--resume" in output

    result = command_line.compare(*many, "--resume", "--stop-after", "2")
    assert result.exit_code == 0, result.stderr
    assert len(command_line.record()["runs"][0]["loss"]) == done + 2
