"""Every example runs on its own, as its reader would run it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
RECORDED = Path(__file__).resolve().parent / "golden" / "curves.json"
EXAMPLES = sorted(FOLDER.glob("*.py"))
#: What makes an example small enough for a test.
ARGUMENTS = {
    "gpt_tutorial": ["--small", "--json", "numbers.json"],
    "bert": ["--steps", "12", "--width", "32"],
    "t5": ["--steps", "25", "--width", "32", "--layers", "1"],
}
#: What is computed here is too small to share, and waiting for a busy core takes a hundred times longer.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(folder: Path, stem: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(FOLDER / f"{stem}.py"), *ARGUMENTS.get(stem, []), *more]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Runs an example, once for all tests, in a folder of its own: the folder, and what came of it."""

    @functools.cache
    def of(stem: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
        folder = tmp_path_factory.mktemp(stem)
        return folder, run(folder, stem)

    return of


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_without_a_warning(path, outcome):
    _, done = outcome(path.stem)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""


def test_the_page_of_the_examples_names_each():
    page = (FOLDER / "README.md").read_text()
    assert [path.name for path in EXAMPLES if f"| `{path.name}` |" not in page] == []


def test_the_first_example_prints_finite_gradients(outcome):
    lines = outcome("first_fp8_linear")[1].stdout.splitlines()
    assert lines[0].startswith("output (2048, 3072)")
    # The loss is a plain sum over 2048 rows, so every element of the bias gradient is 2048.
    norm = float(lines[2].rpartition(" ")[2])
    assert norm == pytest.approx(2048 * 3072**0.5, rel=1e-6)


def test_a_factory_with_the_quantizers_of_a_recipe_trains_as_that_recipe(outcome):
    _, *lines = outcome("custom_recipe")[1].stdout.splitlines()
    losses = {line[:26].strip(): line[26:].split() for line in lines}
    assert losses["the same by role"] == losses["built-in current scaling"] != losses["bf16"]
    for first, last in losses.values():
        assert float(last) < float(first) / 4


def test_the_masked_model_does_better_than_no_idea_under_every_recipe(outcome):
    first, _, *rows = outcome("bert")[1].stdout.splitlines()
    guess = float(first.split(";")[1].split()[0])
    assert guess == pytest.approx(math.log(256), abs=1e-3)
    losses = {row.split()[0]: float(row.split()[2]) for row in rows}
    assert sorted(losses) == ["bf16", "current", "delayed"]
    assert all(loss < guess for loss in losses.values())


def test_the_encoder_decoder_learns_alike_under_every_recipe(outcome):
    guess, _, *rows = outcome("t5")[1].stdout.splitlines()
    assert float(guess.split()[0]) == pytest.approx(math.log(16), abs=1e-3)
    losses = {row.split()[0]: float(row.split()[2]) for row in rows}
    assert sorted(losses) == ["bf16", "current", "delayed"]
    assert all(loss < 0.9 * math.log(16) for loss in losses.values())
    assert max(losses.values()) < 1.02 * min(losses.values())
    assert all("->" in row for row in rows)


@pytest.fixture
def tutorial(outcome):
    """Numbers of the small tutorial."""
    folder, done = outcome("gpt_tutorial")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "numbers.json").read_text())["runs"]


def mean_of_last(numbers):
    return sum(numbers["losses"][-20:]) / 20


@pytest.mark.parametrize("name", ["delayed", "current", "plain PyTorch"])
def test_every_run_of_the_tutorial_learns_as_bf16_does(tutorial, name):
    assert 4.5 < tutorial[name]["losses"][0] < 5
    assert mean_of_last(tutorial[name]) < 2.1
    assert mean_of_last(tutorial[name]) == pytest.approx(mean_of_last(tutorial["bf16"]), rel=0.02)


@pytest.mark.parametrize("name", ["bf16", "delayed", "current", "plain PyTorch"])
def test_the_tutorial_prints_how_much_of_held_out_sequences_each_run_knows(tutorial, outcome, name):
    share = tutorial[name]["accuracy"]
    assert 1 / 12 < share < 1
    row = next(line for line in outcome("gpt_tutorial")[1].stdout.splitlines() if line.startswith(name.ljust(13)))
    assert row[13:].split()[:2] == [str(len(tutorial[name]["losses"])), f"{share:.1%}"]


@pytest.fixture
def gpt(monkeypatch):
    """The tutorial's module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpt_tutorial  # noqa: PLC0415 - found on the path from here on

    yield gpt_tutorial
    for name in ("gpt_tutorial", "gpt_model"):
        sys.modules.pop(name, None)


def test_a_run_goes_on_until_more_is_right_than_was_asked_for(gpt):
    sizes = dataclasses.replace(gpt.SMALL, steps=10)
    run = gpt.train(sizes, None, plain=True, until=0.2)
    more = len(run.losses) - sizes.steps
    assert more > 0
    assert more % gpt.LOOK == 0
    assert run.accuracy == gpt.held_out_accuracy(run, sizes) > 0.2


@pytest.mark.slow
def test_every_run_of_the_small_tutorial_reaches_95_percent(tmp_path):
    done = run(tmp_path, "gpt_tutorial", "--until-accuracy", "0.95")
    assert done.returncode == 0, done.stdout
    runs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert all(numbers["accuracy"] > 0.95 and len(numbers["losses"]) < 600 for numbers in runs.values())


def test_fp8_differs_from_bf16_and_the_recipes_from_each_other(tutorial):
    last = [tutorial[name]["losses"][-1] for name in ("bf16", "delayed", "current")]
    assert len(set(last)) == 3


def test_fp8_keeps_fewer_bytes_for_the_backward(tutorial):
    assert tutorial["delayed"]["kept"] < tutorial["bf16"]["kept"]
    assert tutorial["current"]["kept"] < tutorial["bf16"]["kept"]


def test_the_check_is_refused_at_other_sizes_than_those_recorded(tmp_path):
    done = run(tmp_path, "gpt_tutorial", "--check")
    assert done.returncode == 2
    assert "full size" in done.stderr


#: Losses of a run beside the recorded ones, as a factor, and whether that passes.
FACTORS = {
    "as_recorded": ({}, True),
    "all_of_them_4_percent_higher": ({"bf16": 1.04, "delayed": 1.04, "current": 1.04}, True),
    "all_of_them_6_percent_higher": ({"bf16": 1.06, "delayed": 1.06, "current": 1.06}, False),
    "delayed_2_percent_off_bf16": ({"delayed": 1.02}, False),
    "current_1_percent_off_bf16": ({"current": 0.99}, False),
    "delayed_not_a_number": ({"delayed": float("nan")}, False),
}


@pytest.mark.parametrize("case", FACTORS)
def test_the_check_passes_what_follows_the_record_and_fails_the_rest(case, gpt, capsys):
    factors, passes = FACTORS[case]
    recorded = json.loads(RECORDED.read_text())
    runs = {
        name: gpt.Run(None, None, [factors.get(name, 1.0) * loss for loss in recorded[key]["losses"]])
        for name, (key, _) in gpt.CHECKED.items()
    }
    assert gpt.check(runs, RECORDED) is passes
    assert ("FAIL" in capsys.readouterr().out) is not passes
