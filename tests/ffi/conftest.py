"""Libraries compiled for one test; skipped where there is no C compiler or no compiled binding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import native_stub
import pytest

from te_hal.ffi.binding import binding
from te_hal.schema.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def stub(tmp_path: Path) -> Callable[..., Path]:
    """Builds a stub library; arguments as native_stub.build without the folder."""
    if native_stub.COMPILER is None:
        pytest.skip("no C compiler")
    try:
        binding()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    return lambda name="libstub.so", **choices: native_stub.build(tmp_path, name, **choices)
