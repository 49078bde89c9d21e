"""The command line in a folder of the test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import CommandLine


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """What is computed here is too small to share, and waiting for a busy core takes a hundred times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


@pytest.fixture
def drawn() -> None:
    """Asked for by tests that want a real plot."""


@pytest.fixture(autouse=True)
def _plots_are_not_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training does here. Comparisons that a file's tests share have a real plot as well."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("te_hal.cli.session.write_plot", lambda path, _summary: path.write_bytes(b"not drawn"))
