"""Each test starts from, and leaves behind, the state after import; random tensors are the same in every run."""

from collections.abc import Iterator

import pytest
import torch

import te_hal
import te_hal.modules as te


@pytest.fixture(autouse=True)
def _state_after_import() -> Iterator[None]:
    te_hal.reset()
    te.FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    yield
    te_hal.reset()
    te.FP8GlobalStateManager.reset()
