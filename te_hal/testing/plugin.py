"""The pytest plugin: ``pytest --pyargs te_hal.testing --te-hal-backend NAME`` runs the kit, a test per case.

Loaded by the entry point of the same name; it imports what it needs when the option is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from te_hal.testing.subject import Subject


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the kit."""
    group = parser.getgroup("te_hal", "conformance of a te_hal backend")
    group.addoption("--te-hal-backend", metavar="NAME", help="the backend to test with te_hal's conformance kit")
    group.addoption("--te-hal-op", metavar="REGEX", default=".*", help="only ops whose name matches")
    group.addoption("--te-hal-quick", action="store_true", help="every value of every axis once, not every pair")
    group.addoption(
        "--te-hal-factory", metavar="MODULE:FUNCTION", default="", help="makes a backend that is not installed"
    )
    group.addoption("--te-hal-lists", metavar="FOLDER", default="", help="where unsupported.toml and xfail.toml are")


def subject_of(config: pytest.Config) -> Subject | None:
    """The backend that the options name; None without one."""
    from te_hal.testing.subject import Subject  # noqa: PLC0415 - every pytest of the environment imports this file

    name = config.getoption("--te-hal-backend")
    if not name:
        return None
    return Subject(name, factory=config.getoption("--te-hal-factory"), lists=config.getoption("--te-hal-lists"))
