"""Blocks of 128: the bytes that Transformer Engine's kernels wrote for the same input."""

from __future__ import annotations

import golden_values
import pytest
import torch
from block_oracle import ROW, SQUARE, real_scales

from te_hal.backends.cpu_reference.cast import dequantize, quantize
from te_hal.schema.formats import E4M3, E5M2

RECORDED = golden_values.load("quantizers")
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
CASES = RECORDED.cases("block/")


def test_every_kind_of_block_was_recorded() -> None:
    assert {case.split("/")[3] for case in CASES} == {"dim=1", "dim=2"}


@pytest.mark.parametrize("case", CASES)
def test_codes_and_factors_are_the_recorded_bytes(case: str) -> None:
    _, _, name, dim, pow2, epsilon, _, _ = case.split("/")
    recorded, mode = RECORDED.case(case), ROW if dim == "dim=1" else SQUARE
    flags = {"power_of_2": pow2 == "pow2=True", "amax_epsilon": float(epsilon.removeprefix("eps="))}
    x = recorded["x"]
    storage = quantize(x, dtype=FORMATS[name].dtype, mode=mode, columnwise=True, **flags)
    for rowwise, copy in ((True, "rowwise"), (False, "columnwise")):
        assert torch.equal(getattr(storage, f"{copy}_data"), recorded[f"{copy}_data"])
        found, expected = getattr(storage, f"{copy}_scale_inv"), recorded[f"{copy}_scale_inv"]
        assert found.shape == expected.shape
        grids = [real_scales(scale_inv, mode, tuple(x.shape), rowwise=rowwise) for scale_inv in (found, expected)]
        assert torch.equal(*grids)


@pytest.mark.parametrize("case", CASES)
def test_a_storage_over_recorded_buffers_decodes_close_to_the_input(case: str) -> None:
    recorded = RECORDED.case(case)
    x = recorded["x"]
    mode = ROW if "dim=1" in case else SQUARE
    whole = quantize(x, dtype=E4M3.dtype, mode=mode, columnwise=True)
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    storage = whole.with_tensors(tuple(recorded[name] for name in names))
    known = x.isfinite()
    for copy in (storage, storage.keep(rowwise=False, columnwise=True)):
        back = dequantize(copy, out_dtype=torch.float32)
        error = (back - x.float())[known].norm() / x.float()[known].norm()
        assert error < 2.0**-4
