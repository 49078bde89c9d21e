"""How many threads a comparison computes with: one where the model is small, else as asked for; and back after it."""

import pytest
import torch

from te_hal.cli.threads import MOST_THREADS, torch_threads


@pytest.fixture(autouse=True)
def _three_threads_before():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "width", "used"),
    [(None, 128, 1), (None, 511, 1), (None, 512, 3), (2, 128, 2), (2, 512, 2)],
    ids=str,
)
def test_a_small_model_has_one_thread_unless_told_and_a_wide_one_those_of_torch(asked, width, used):
    with torch_threads(asked, width):
        assert torch.get_num_threads() == used
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("options", "used"), [((), "1 thread"), (("--threads", "2"), "2 threads")])
def test_the_report_and_the_record_say_how_many(command_line, options, used):
    result = command_line.compare("--stop-after", "1", *options)
    assert result.exit_code == 0, result.stderr
    assert f", {used}\n" in result.stdout
    assert command_line.record()["machine"]["threads"] == int(used.split()[0])
    assert torch.get_num_threads() == 3


def test_resuming_with_another_number_of_threads_is_told(command_line):
    command_line.compare("--stop-after", "1")
    result = command_line.compare("--resume", "--stop-after", "1", "--threads", "2")
    assert "threads was 1, is 2: the numbers may differ in the last bits" in result.stderr


@pytest.mark.parametrize("count", [0, MOST_THREADS + 1])
def test_other_numbers_of_threads_are_refused(command_line, count):
    result = command_line.compare("--threads", str(count))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"te-hal compare: --threads: got {count}; accepted: an integer from 1 to 1024; choose another value"
    ]
    assert not command_line.out.exists()
