"""Each dispatch test starts from, and leaves behind, the state after import."""

from collections.abc import Iterator

import pytest

import te_hal


@pytest.fixture(autouse=True)
def _state_after_import() -> Iterator[None]:
    te_hal.reset()
    yield
    te_hal.reset()
