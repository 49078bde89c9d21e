"""Several delayed-scaling histories in one op: each rolls by itself, as docs/numerics.md has it (D1 to D4)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from counting_backend import Counting

import te_hal
from te_hal import ops
from te_hal.schema.errors import ArgumentError

MAXIMA = [448.0, 57344.0]


def rolled(history: np.ndarray, scale: np.ndarray, fp8_max: float, margin: int) -> tuple[np.ndarray, np.ndarray]:
    """One update by the maximum, column by column."""
    history, scale = history.copy(), scale.copy()
    for column in range(history.shape[1]):
        if history[0, column] == 0.0:
            continue
        window = history[:, column]
        scale[column] = np.float32(fp8_max * 2.0**-margin) / window.max()
        history[:, column] = np.roll(window, -1)
        history[0, column] = 0.0
    return history, scale


def two_groups() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    histories = [torch.rand(shape, generator=generator) for shape in ((4, 3), (16, 2))]
    histories[0][0, 1] = 0.0
    return histories, [torch.ones(3), torch.ones(2)]


@pytest.mark.parametrize("backend", ["cpu_reference", "composing"])
def test_each_group_rolls_by_its_own_shape_and_format(backend: str) -> None:
    if backend == "composing":
        Counting("composing")
    histories, scales = two_groups()
    expected = [
        rolled(history.numpy(), scale.numpy(), fp8_max, 1)
        for history, scale, fp8_max in zip(histories, scales, MAXIMA, strict=True)
    ]
    with te_hal.use_backend(backend):
        ops.update_delayed_scales(histories, scales, fp8_maxima=MAXIMA, margin=1)
    for (history, scale), found_history, found_scale in zip(expected, histories, scales, strict=True):
        np.testing.assert_array_equal(found_history.numpy(), history)
        np.testing.assert_array_equal(found_scale.numpy(), scale)


def test_a_reduced_amax_stands_for_the_running_one_of_its_group() -> None:
    histories, scales = two_groups()
    reduced = [torch.full((3,), 2.0), torch.full((2,), 4.0)]
    ops.update_delayed_scales(histories, scales, reduced_amaxes=reduced, fp8_maxima=MAXIMA)
    assert scales[0].tolist() == [224.0] * 3
    assert scales[1].tolist() == [14336.0] * 2
    assert histories[1][-1].tolist() == [4.0] * 2


def test_a_wrong_group_changes_none_and_is_named() -> None:
    histories, scales = two_groups()
    before = [tensor.clone() for tensor in (*histories, *scales)]
    with pytest.raises(ArgumentError, match="scales, group 1"):
        ops.update_delayed_scales(histories, [scales[0], torch.ones(3)], fp8_maxima=MAXIMA)
    assert all(torch.equal(a, b) for a, b in zip((*histories, *scales), before, strict=True))
