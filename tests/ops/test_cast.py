"""A cast with a scale that makes no sense: refusing it would read it, so the rules say what comes out."""

from __future__ import annotations

import math

import pytest
import torch

import te_hal
from te_hal import ops

INPUT = [1.0, -3.0, math.inf, math.nan, 0.0]
#: Scale to (E4M3 codes of INPUT, scale_inv), by C1 to C5: 0x40 is 2, 0x4C is 6, 0x7E the largest, 0x7F NaN.
SCALES = {
    "nan": (math.nan, [0x7F, 0x7F, 0x7F, 0x7F, 0x7F], math.nan),
    "zero": (0.0, [0x00, 0x80, 0x7F, 0x7F, 0x00], math.inf),
    "negative": (-2.0, [0xC0, 0x4C, 0xFE, 0x7F, 0x80], -0.5),
    "infinite": (math.inf, [0x7E, 0xFE, 0x7E, 0x7F, 0x7F], 0.0),
}


@pytest.mark.parametrize("case", SCALES)
def test_any_scale_gives_what_the_rules_say(case: str) -> None:
    scale, codes, scale_inv = SCALES[case]
    with te_hal.use_backend("cpu_reference"):
        made = ops.quantize(torch.tensor(INPUT), torch.tensor([scale]), dtype=torch.float8_e4m3fn)
    assert made.rowwise_data.tolist() == codes
    assert made.rowwise_scale_inv.item() == pytest.approx(scale_inv, rel=0.0, abs=0.0, nan_ok=True)
