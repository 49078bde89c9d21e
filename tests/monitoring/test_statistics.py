"""What is counted about a quantization, against counting with ml_dtypes and float64."""

import ml_dtypes
import numpy as np
import pytest
import torch

import te_hal.modules as te
from te_hal.monitoring.statistics import combine, of_plain, of_quantized
from te_hal.quantization.block_quantizers import Float8BlockQuantizer, MXFP8Quantizer
from te_hal.schema.formats import element_format

FORMATS = {
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, 448.0),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, 57344.0),
}


def wide_values(dtype=torch.float32):
    """Magnitudes over 60 powers of two, and zeros."""
    values = torch.randn(48, 64) * torch.exp2(torch.randint(-30, 30, (48, 64)).float())
    values[::7, ::5] = 0.0
    return values.to(dtype)


def counted(values, scale, fmt):
    """Clipped and flushed values of a cast, one by one in float64."""
    narrow, largest = FORMATS[fmt]
    wide = values.double().numpy().ravel() * float(scale)
    codes = np.clip(wide, -largest, largest).astype(np.float32).astype(narrow).astype(np.float64)
    return int((np.abs(wide) > largest).sum()), int(((wide != 0) & (codes == 0)).sum())


def delayed(scale, fmt, **usages):
    return te.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), fmt, **usages)


def observed(quantizer, values, *, rowwise=True, columnwise=False, plain=True):
    seen = []
    quantizer.observer = lambda *facts: seen.append(facts)
    quantizer.quantize_storage(values, rowwise=rowwise, columnwise=columnwise)
    ((told, tensor, storage),) = seen
    assert told is quantizer
    return of_quantized(quantizer, tensor if plain else None, storage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 1.7, 2.0**20])
def test_clipped_and_flushed_values_are_those_that_a_loop_counts(dtype, fmt, scale):
    values = wide_values(dtype)
    seen = observed(delayed(scale, fmt), values)
    assert (seen.clipped.item(), seen.flushed.item()) == counted(values, np.float32(scale), fmt)
    assert seen.amax.item() == values.abs().max().item()
    assert (seen.values, seen.basis) == (values.numel(), "values")
    assert seen.scale.item() == np.float32(scale)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_columnwise_copy_alone_gives_the_same_numbers(fmt):
    values = wide_values()
    rowwise = observed(delayed(1.7, fmt), values)
    columnwise = observed(delayed(1.7, fmt), values, rowwise=False, columnwise=True)
    assert rowwise == columnwise


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_current_scaling_clips_nothing_and_its_scale_is_the_largest_code_over_amax(fmt):
    for seed in range(50):
        torch.manual_seed(seed)
        values = wide_values()
        seen = observed(te.Float8CurrentScalingQuantizer(fmt), values)
        assert seen.clipped.item() == 0
        assert seen.scale.item() == pytest.approx(FORMATS[fmt][1] / values.abs().max().item(), rel=2e-7)
        assert seen.flushed.item() == counted(values, seen.scale.item(), fmt)[1]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_without_the_plain_tensor_the_codes_are_counted(fmt):
    values = wide_values()
    _, largest = FORMATS[fmt]
    clipped, flushed = counted(values, 1.7, fmt)
    seen = observed(delayed(1.7, fmt), values, plain=False)
    # What rounds to the largest code counts there too: from the middle between it and the one below.
    middle = 432.0 if largest == 448 else 53248.0
    at_the_edge = int((values.double().abs() * np.float32(1.7) >= middle).sum())
    assert seen.clipped.item() == at_the_edge > clipped
    assert seen.flushed.item() == flushed + int((values == 0).sum())
    assert seen.amax.item() == values.abs().max().item()  # as the quantizer recorded it
    assert seen.basis == "codes"


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_codes_alone_show_no_clipping_where_amax_is_in_range(fmt):
    values = wide_values()
    amax = values.abs().max().item()
    assert observed(delayed(FORMATS[fmt][1] / amax, fmt), values, plain=False).clipped.item() == 0
    assert observed(te.Float8CurrentScalingQuantizer(fmt), values, plain=False).clipped.item() == 0


def test_the_amax_of_codes_alone_is_that_of_what_they_stand_for():
    values = wide_values()
    seen = observed(te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn), values, plain=False)
    assert seen.amax.item() == pytest.approx(values.abs().max().item(), rel=1e-6)


@pytest.mark.parametrize("plain", [True, False], ids=["values", "codes"])
def test_a_nan_shows_in_amax(plain):
    values = wide_values()
    values[3, 5] = float("nan")
    assert observed(delayed(1.0, torch.float8_e4m3fn), values, plain=plain).amax.isnan()
    assert of_plain(values).amax.isnan()


@pytest.mark.parametrize("copies", [(True, False), (False, True)], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("quantizer", [Float8BlockQuantizer, MXFP8Quantizer], ids=lambda kind: kind.__name__)
def test_blocks_with_scales_of_their_own_clip_nothing_and_flush_what_is_zero_afterwards(quantizer, copies):
    values = torch.randn(128, 256) * torch.exp2(torch.randint(-30, 30, (128, 256)).float())
    made = quantizer(torch.float8_e4m3fn, rowwise=copies[0], columnwise=copies[1])
    seen = observed(made, values, rowwise=copies[0], columnwise=copies[1])
    decoded = made(values).dequantize()
    assert seen.clipped.item() == 0
    assert seen.flushed.item() == int(((values != 0) & (decoded == 0)).sum()) > 0
    assert seen.amax.item() == values.abs().max().item()
    assert seen.scale is None
    by_codes = observed(made, values, rowwise=copies[0], columnwise=copies[1], plain=False)
    assert by_codes.amax.item() == decoded.abs().max().item()
    assert (by_codes.clipped.item(), by_codes.flushed.item()) == (0, int((decoded == 0).sum()))


def test_microbatches_add_up():
    quantizer, parts = delayed(1.7, torch.float8_e4m3fn), [wide_values() for _ in range(3)]
    seen = combine([observed(quantizer, values) for values in parts])
    together = torch.cat(parts)
    assert (seen.clipped.item(), seen.flushed.item()) == counted(together, np.float32(1.7), torch.float8_e4m3fn)
    assert (seen.values, seen.amax.item()) == (together.numel(), together.abs().max().item())


def test_where_a_role_was_seen_quantized_and_plain_the_quantized_one_counts():
    values = wide_values()
    quantized = observed(delayed(1.7, torch.float8_e4m3fn), values)
    assert combine([of_plain(2 * values), quantized]).amax == quantized.amax


def test_the_largest_code_of_each_format_is_the_one_ml_dtypes_gives():
    from te_hal.monitoring.statistics import _largest_code  # noqa: PLC0415 - private, for this test alone

    for fmt, (narrow, largest) in FORMATS.items():
        assert _largest_code(element_format(fmt)) == np.array(largest, narrow).view(np.uint8)
