"""The kinds of model that `te-hal compare` trains, and what it has to know about them before they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_hal.cli import gpt, mlp

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from te_hal.cli.config import CompareConfig


Model = mlp.WindowMlp | gpt.ByteGpt


@dataclass(frozen=True)
class ModelKind:
    """A kind of model.

    Attributes:
        build: makes one, in fp32, under torch's global seed.
        parameter_count: of the model that a configuration makes.
        activations_per_token: about how many values a training step keeps for each prediction.
    """

    build: Callable[[CompareConfig, torch.device], Model]
    parameter_count: Callable[[CompareConfig], int]
    activations_per_token: Callable[[CompareConfig], int]


KINDS = {
    "gpt": ModelKind(gpt.ByteGpt, gpt.parameter_count, gpt.activations_per_token),
    "mlp": ModelKind(mlp.WindowMlp, mlp.parameter_count, mlp.activations_per_token),
}
