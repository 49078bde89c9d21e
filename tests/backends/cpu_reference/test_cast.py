"""quantize and dequantize against recorded bytes, ml_dtypes, numpy and the vectors of docs/numerics.md.

Cases B01 (jax-ml/ml_dtypes#400, pytorch/pytorch#178817), B02 (tenstorrent/tt-metal#51971) and B04 (pytorch/ao#4713).
The E2M1 part of B02 comes with the issue "Every recipe, real low-precision tensors, and state that resumes bit for
bit".
"""

from __future__ import annotations

import math

import golden_values
import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_codes import ML_DTYPES, codes_of, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from te_hal.backends.cpu_reference.amax import amax, compute_scale
from te_hal.backends.cpu_reference.cast import dequantize, quantize
from te_hal.schema.formats import E4M3, E5M2, FLOAT32_MAX, ElementFormat, element_format
from te_hal.schema.storage import QuantizedStorage

INF, NAN = math.inf, math.nan
FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda fmt: fmt.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
BY_NAME = {"e4m3": E4M3, "e5m2": E5M2}
RECORDED = golden_values.load("quantizers")
ONE = torch.ones(1)

#: Values to their codes in E4M3 and E5M2 at scale 1: the table in docs/numerics.md.
VECTORS = {
    "beyond the range of E4M3": ([448.0, 464.0, 465.0, 1000.0, INF], "7E 7E 7E 7E 7E", "5F 5F 5F 64 7B"),
    "negative": ([-1000.0, -INF], "FE FE", "E4 FB"),
    "beyond the range of E5M2": ([57344.0, 61440.0, 3e38], "7E 7E 7E", "7B 7B 7B"),
    "nan": ([NAN, -NAN], "7F 7F", "7F 7F"),
    "ties of E4M3": ([17.0, 19.0], "58 5A", "4C 4D"),
    "subnormal ties of E4M3": ([2**-10, 1.5 * 2**-9], "00 02", "14 1A"),
    "subnormal ties of E5M2": ([2**-17, 1.5 * 2**-16], "00 00", "00 02"),
    "rounded to zero": ([-1e-30, -0.0, 0.0], "80 80 00", "80 80 00"),
}


def assert_same_codes(values: torch.Tensor, format: ElementFormat, scale: float = 1.0) -> None:
    found = quantize(values, torch.tensor([scale]), dtype=format.dtype).rowwise_data
    expected = codes_of(values.float().numpy(), format, np.float32(scale))
    wrong = np.flatnonzero(found.numpy().ravel() != expected.ravel())
    assert wrong.size == 0, [
        (values.flatten()[i].item(), found.flatten()[i].item(), expected.flat[i]) for i in wrong[:5]
    ]


@pytest.mark.parametrize(("values", "e4m3", "e5m2"), VECTORS.values(), ids=VECTORS)
def test_the_written_vectors(values: list[float], e4m3: str, e5m2: str) -> None:
    for target, codes in ((E4M3, e4m3), (E5M2, e5m2)):
        found = quantize(torch.tensor(values), ONE, dtype=target.dtype).rowwise_data
        assert found.numpy().tobytes() == bytes.fromhex(codes), target.name


def test_overflow_saturates_and_nan_stays() -> None:
    """Case B01, whatever the installed torch's own conversion does beyond the range."""
    values = torch.tensor([1000.0, 448.0, 464.0, 465.0, -1000.0, NAN])
    storage = quantize(values, ONE, dtype=torch.float8_e4m3fn)
    assert storage.rowwise_data.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F]
    assert dequantize(storage)[:5].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0]
    assert dequantize(storage)[5].isnan()


@FORMATS
@DTYPES
def test_finite_codes_survive_decoding_and_encoding(format: ElementFormat, dtype: torch.dtype) -> None:
    """Case B02: 254 codes of E4M3 and 248 of E5M2, both zeros with their sign."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = values_of(codes, format)
    finite = torch.from_numpy(np.isfinite(values))
    again = quantize(torch.from_numpy(values).to(dtype), ONE, dtype=format.dtype).rowwise_data
    assert finite.sum().item() == (254 if format is E4M3 else 248)
    assert torch.equal(again[finite], codes[finite])
    assert again[~finite & torch.from_numpy(np.isnan(values))].unique().tolist() == [0x7F]
    if format is E5M2:
        assert again[[0x7C, 0xFC]].tolist() == [0x7B, 0xFB]


@pytest.mark.parametrize("shape", [(8, 16), (0,)], ids=str)
def test_a_zero_tensor_gives_zero_codes_and_finite_factors(shape: tuple[int, ...]) -> None:
    """Case B04."""
    zeros = torch.zeros(shape)
    scale = compute_scale(amax(zeros), fp8_max=448.0)
    storage = quantize(zeros, scale, dtype=torch.float8_e4m3fn)
    assert storage.rowwise_scale_inv.tolist() == [1.0]
    assert torch.equal(dequantize(storage), zeros)


@FORMATS
def test_a_zero_row_stays_zero(format: ElementFormat) -> None:
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    values[2] = 0.0
    scale = compute_scale(amax(values), fp8_max=format.max)
    assert dequantize(quantize(values, scale, dtype=format.dtype))[2].tolist() == [0.0] * 8


@pytest.mark.parametrize("case", RECORDED.cases("delayed/"))
def test_given_scale_equals_what_was_recorded(case: str) -> None:
    recorded = RECORDED.case(case)
    _, _, name, scale = case.split("/")
    asked = {"dtype": BY_NAME[name].dtype, "columnwise": True}
    running = torch.zeros(1)
    storage = quantize(recorded["x"], torch.tensor([float(scale)]), amax=running, **asked)
    assert torch.equal(storage.rowwise_data, recorded["data"])
    assert torch.equal(storage.columnwise_data, recorded["transpose"])
    assert torch.equal(storage.rowwise_scale_inv, recorded["scale_inv"])
    assert torch.equal(running, recorded["amax"])
    assert torch.equal(dequantize(storage), recorded["dequant"])


@pytest.mark.parametrize("case", RECORDED.cases("special/"))
def test_special_values_equal_what_was_recorded(case: str) -> None:
    recorded = RECORDED.case(case)
    dtype = BY_NAME[case.split("/")[1]].dtype
    running = torch.zeros(1)
    assert torch.equal(quantize(recorded["x"], ONE, amax=running, dtype=dtype).rowwise_data, recorded["data"])
    assert torch.equal(running, recorded["amax"])


@pytest.mark.parametrize("case", RECORDED.cases("current/"))
def test_own_scale_equals_what_was_recorded(case: str) -> None:
    recorded = RECORDED.case(case)
    _, _, name, power_of_2, epsilon, _ = case.split("/")
    target = BY_NAME[name]
    scale = compute_scale(
        amax(recorded["x"]),
        fp8_max=target.max,
        power_of_2=power_of_2 == "pow2=True",
        epsilon=float(epsilon.removeprefix("eps=")),
    )
    storage = quantize(recorded["x"], scale, dtype=target.dtype, columnwise=True)
    assert torch.equal(storage.rowwise_data, recorded["data"])
    assert torch.equal(storage.columnwise_data, recorded["transpose"])
    assert torch.equal(storage.rowwise_scale_inv, recorded["scale_inv"])


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_agrees_with_ml_dtypes(format: ElementFormat, dtype: torch.dtype) -> None:
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for scale in (1.0, 0.3, 1024.0, 2.0**-120, FLOAT32_MAX):
        assert_same_codes(values, format, scale)


@FORMATS
def test_random_fp32_bits_agree_with_ml_dtypes(format: ElementFormat) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(4))
    assert_same_codes(bits.to(torch.int32).view(torch.float32), format)
    exponents = torch.randint(100, 146, (1 << 20,), generator=torch.Generator().manual_seed(5)) << 23
    near = (bits & 0x807FFFFF | exponents).to(torch.int32).view(torch.float32)
    for scale in (1.0, 0.7, 37.0):
        assert_same_codes(near, format, scale)


@FORMATS
def test_neighbours_of_every_tie_agree_with_ml_dtypes(format: ElementFormat) -> None:
    """Both sides of each value half way between two codes, and the values themselves, by one unit of fp32."""
    values = np.arange(256, dtype=np.uint8).view(ML_DTYPES[format]).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    ties = np.concatenate([(values[1:] + values[:-1]) / 2, values, [1.0625 * format.max]]).astype(np.float32)
    around = [np.nextafter(ties, np.float32(-INF)), ties, np.nextafter(ties, np.float32(INF))]
    assert_same_codes(torch.from_numpy(np.concatenate(around)), format)


@settings(deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=64),
    scale=st.floats(min_value=2.0**-140, max_value=FLOAT32_MAX, width=32),
    format=st.sampled_from([E4M3, E5M2]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_value_at_any_scale_agrees_with_ml_dtypes(
    values: list[float], scale: float, format: ElementFormat, dtype: torch.dtype
) -> None:
    assert_same_codes(torch.tensor(values).to(dtype), format, scale)


@FORMATS
@DTYPES
def test_nan_of_any_sign_and_payload_becomes_7f_where_it_stood(format: ElementFormat, dtype: torch.dtype) -> None:
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(6)).to(dtype)
    bits = values.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)
    quiet = torch.full_like(values, NAN).view(bits.dtype).view(-1)
    clean = quantize(values, ONE, dtype=format.dtype).rowwise_data.clone().view(-1)
    sign = torch.iinfo(bits.dtype).min
    for position, pattern in ((0, 0), (700, sign), (701, 1), (1499, sign + 5)):
        bits[position] = quiet[position] | pattern
        clean[position] = 0x7F
    assert values.isnan().sum() == 4
    assert torch.equal(quantize(values, ONE, dtype=format.dtype).rowwise_data.view(-1), clean)


@FORMATS
def test_zero_times_an_infinite_scale_is_nan(format: ElementFormat) -> None:
    storage = quantize(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([INF]), dtype=format.dtype)
    top = 0x7E if format is E4M3 else 0x7B
    assert storage.rowwise_data.tolist() == [0x7F, top, 0x80 | top]
    assert quantize(torch.ones(2), torch.tensor([NAN]), dtype=format.dtype).rowwise_data.tolist() == [0x7F, 0x7F]


def test_scale_inv_is_one_ieee_division() -> None:
    scales = torch.rand(500, generator=torch.Generator().manual_seed(7)) * 1000
    scales = torch.cat([scales, torch.tensor([FLOAT32_MAX, 2.0**127, 1e-38, 1e-40])])
    found = [quantize(ONE, scale.view(1), dtype=E4M3.dtype).rowwise_scale_inv.item() for scale in scales]
    with np.errstate(over="ignore"):
        assert found == (np.float32(1.0) / scales.numpy()).tolist()


@FORMATS
@pytest.mark.parametrize("scale", [1.0, 0.3, 1024.0, FLOAT32_MAX, 1e-37])
@DTYPES
def test_dequantize_rounds_the_fp32_product_once(format: ElementFormat, scale: float, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale_inv = 1.0 / torch.tensor([scale])
    storage = QuantizedStorage(
        format=format,
        mode=quantize(ONE, ONE, dtype=format.dtype).mode,
        shape=(16, 16),
        dtype=dtype,
        rowwise_data=codes,
        rowwise_scale_inv=scale_inv,
    )
    numpy_dtype = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}[dtype]
    with np.errstate(all="ignore"):
        expected = values_of(codes, format) * scale_inv.numpy()
        expected = expected.astype(numpy_dtype).astype(np.float32)
    found = dequantize(storage)
    assert found.dtype == dtype
    assert np.array_equal(found.float().numpy(), expected, equal_nan=True)
    assert torch.equal(dequantize(storage, out_dtype=torch.float32).to(dtype).isnan(), found.isnan())


def test_dequantize_takes_the_dtype_asked_for() -> None:
    storage = quantize(torch.ones(3, dtype=torch.bfloat16), ONE, dtype=E4M3.dtype)
    assert dequantize(storage).dtype == torch.bfloat16
    assert dequantize(storage, out_dtype=torch.float32).dtype == torch.float32
    assert element_format(E4M3.dtype) is storage.format
