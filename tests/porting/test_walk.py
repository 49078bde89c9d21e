"""docs/porting.md can be followed: all of it in the full run, what follows it in the quick one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import native_stub
import pytest

import te_hal

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "follow_porting.py"


@pytest.fixture(scope="module")
def walk():
    spec = spec_from_file_location("follow_porting", SCRIPT)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_page_has_a_step_of_every_kind_and_no_block_without_a_place(walk):
    found = list(walk.steps(walk.PAGE.read_text()))
    assert {step.action for step in found} == {"run", "expect", *walk._EDITS}


def test_a_block_that_nobody_knows_what_to_do_with_is_an_error(walk):
    with pytest.raises(ValueError, match="without a line that says where it goes"):
        list(walk.steps("Look:\n\n```python\nx = 1\n```\n"))


CONTENT = "a\n    b\nc\n"
EDITS = {
    "instead": (("instead", "B1\nB2\n", "f", "b"), "a\n    B1\n    B2\nc\n"),
    "below": (("below", "d\n", "f", "a"), "a\nd\n    b\nc\n"),
    "remove": (("remove", "a\n", "f"), "    b\nc\n"),
    "end": (("end", "d\n", "f"), "a\n    b\nc\nd\n"),
    "new": (("new", "d\n", "f"), "d\n"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_does_what_the_page_says(walk, edit):
    step, due = EDITS[edit]
    assert walk.edited(walk.Step(*step), CONTENT) == due


@pytest.mark.parametrize(
    "step", [("instead", "x\n", "f", "nowhere"), ("remove", "nothing\n", "f"), ("below", "x\n", "f", "d")]
)
def test_an_edit_of_what_is_not_there_is_an_error(walk, step):
    with pytest.raises(ValueError, match="0 times"):
        walk.edited(walk.Step(*step), CONTENT)


def test_a_block_runs_where_the_one_before_it_ended_and_its_output_is_held_against_the_page(walk, tmp_path):
    walker = walk.Walk(tmp_path, {"PATH": "/usr/bin:/bin"})
    assert walker.take(walk.Step("run", "echo hello there; mkdir sub; cd sub\n")) == []
    assert walker.take(walk.Step("expect", "hello ...\n")) == []
    assert walker.take(walk.Step("expect", "hello\n"))[0] == "not printed: hello"
    assert walker.folder == tmp_path / "sub"
    assert walker.take(walk.Step("run", "false\n"))[0].startswith("ended with 1")


@pytest.mark.slow
def test_the_walk_ends_with_a_certificate(tmp_path):
    native_stub.need()
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    site = next(environment.glob("lib/python*/site-packages"))
    checkout = Path(te_hal.__file__).parents[1]
    (site / "installed.pth").write_text(f"{checkout}\n{sysconfig.get_path('purelib')}\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--python", str(python)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
