"""What Transformer Engine's norms and activations wrote with scales per block, by the fused ops and by their parts.

Blocks are cast from the result rounded to bf16 (docs/numerics.md, F1 and F2). A result that differs from the recorded
one in a bit, as few do between a CPU and a GPU, could change the bytes of its blocks; none does here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import golden_values
import pytest
import torch
from block_oracle import ROW, SQUARE, real_scales

from te_hal import ops
from te_hal.schema.formats import E4M3

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage

RECORDED = golden_values.load("fused_blocks")
MODES = {"block1d": ROW, "block2d": SQUARE}


def flags_of(case: str) -> dict[str, object]:
    return {"dtype": E4M3.dtype, "mode": MODES[case.rpartition("/")[2]], "columnwise": True, "power_of_2": True}


def assert_written(storage: QuantizedStorage, recorded: dict[str, torch.Tensor]) -> None:
    for rowwise, name in ((True, "rowwise"), (False, "columnwise")):
        assert torch.equal(getattr(storage, f"{name}_data"), recorded[f"{name}_data"]), name
        found, expected = (
            real_scales(scale_inv, storage.mode, (storage.shape[0], storage.shape[1]), rowwise=rowwise)
            for scale_inv in (getattr(storage, f"{name}_scale_inv"), recorded[f"{name}_scale_inv"])
        )
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("case", RECORDED.cases("norm/"))
def test_a_norm_with_blocks_gives_the_fused_bytes(case: str) -> None:
    _, norm, _, zero_centered, _ = case.split("/")
    recorded = RECORDED.case(case)
    names = ("x", "weight", "bias") if norm == "layernorm" else ("x", "weight")
    given, centered = [recorded[name] for name in names], zero_centered == "zc=True"
    output, *_ = getattr(ops, f"{norm}_fwd")(*given, zero_centered_gamma=centered)
    assert_written(ops.quantize(output, **flags_of(case)), recorded)  # type: ignore[arg-type]
    fused, *_ = getattr(ops, f"{norm}_quantize")(*given, zero_centered_gamma=centered, **flags_of(case))
    assert_written(fused, recorded)


@pytest.mark.parametrize("case", RECORDED.cases("act/"))
def test_an_activation_with_blocks_gives_the_fused_bytes(case: str) -> None:
    activation, recorded = case.split("/")[1], RECORDED.case(case)
    output = ops.activation_fwd(recorded["x"], activation=activation)
    assert_written(ops.quantize(output, **flags_of(case)), recorded)  # type: ignore[arg-type]
    assert_written(ops.activation_quantize(recorded["x"], activation=activation, **flags_of(case)), recorded)


@pytest.mark.parametrize("case", RECORDED.cases())
def test_the_recorded_result_gives_the_recorded_bytes(case: str) -> None:
    recorded = RECORDED.case(case)
    assert_written(ops.quantize(recorded["plain"], **flags_of(case)), recorded)  # type: ignore[arg-type]
