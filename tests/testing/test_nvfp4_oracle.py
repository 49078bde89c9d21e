"""The kit's oracle of NVFP4 against loops with ml_dtypes, a published vector, and the rules' own numbers."""

from __future__ import annotations

import numpy as np
import nvfp4_by_hand
import pytest
import torch
from hard_values import draw

from te_hal.schema.formats import ScalingMode
from te_hal.testing.case import cases
from te_hal.testing.oracles import nvfp4, philox

PLAIN, SQUARE, HADAMARD = ScalingMode.NVFP4, ScalingMode.NVFP4_16X16, ScalingMode.NVFP4_HADAMARD


@pytest.mark.parametrize("pattern", ["wide", "any bits"])
@pytest.mark.parametrize("mode", [PLAIN, SQUARE, HADAMARD])
@pytest.mark.parametrize("rowwise", [True, False])
def test_a_cast_is_the_one_by_loops(rowwise, mode, pattern):
    x = draw((32, 48), torch.bfloat16, pattern)
    if mode is HADAMARD:  # by hand it is exact before one rounding, so of numbers that fp32 adds exactly
        x = (torch.randint(-8, 9, (32, 48), generator=torch.Generator().manual_seed(1)) / 4).bfloat16()
    made = nvfp4.quantized(x.float().numpy(), mode, rowwise=rowwise, seed=None)
    lines = x if rowwise else x.t()
    lines = nvfp4_by_hand.hadamard(lines) if mode is HADAMARD and not rowwise else lines
    expected = nvfp4_by_hand.cast(lines.contiguous(), square=mode is SQUARE)
    codes, factors = (made.codes, made.factors) if rowwise else (made.codes.T, made.factors.T)
    assert np.array_equal((codes & 7) | ((codes >> 4) & 8), expected.codes)
    assert np.array_equal(factors, expected.scales)
    assert made.amax[0] == expected.amax


def test_philox_gives_its_authors_numbers():
    assert philox.words((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def test_chance_rounds_up_as_often_as_the_distance_says():
    x = np.full((64, 160), 3.25, np.float32)
    x[:, ::16] = 6.0
    rounded_up = nvfp4.quantized(x, PLAIN, rowwise=True, seed=5).codes[:, np.arange(160) % 16 > 0] == 6
    assert abs(rounded_up.mean() - 0.25) < 4 * (0.25 * 0.75 / rounded_up.size) ** 0.5


@pytest.mark.parametrize("mode", [PLAIN, SQUARE, HADAMARD])
@pytest.mark.parametrize("op", ["quantize", "dequantize", "gemm", "rmsnorm_quantize"])
def test_every_mode_is_tried(op, mode):
    words = [word for case in cases(op) for word in case.words.values()]
    assert sum(word == mode.value or f".{mode.value}." in word for word in words) > 8
