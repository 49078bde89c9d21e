"""Per-tensor casts, amax, scales and transposition against cpu_reference, byte for byte."""

import pytest
import torch
from native_cases import DTYPE_CODES, FP8_DTYPES, FP8_MAX, PLAIN_DTYPES, SHAPES, bytes_like, same_bytes, tensor_of

from te_hal.backends.cpu_reference import amax as reference_amax
from te_hal.backends.cpu_reference import cast as reference
from te_hal.schema.formats import ScalingMode, element_format
from te_hal.schema.storage import QuantizedStorage

E4M3 = torch.float8_e4m3fn
BIG_SHAPES = ((600, 2048), (64, 16384))  # more blocks than threads of the host, more columns than a block of threads


def quantize(library, x, dtype, scale, *, amax=None, order="TRANSPOSED"):
    """(rowwise codes, columnwise codes, scale_inv) of the kernel."""
    rows, cols = x.shape
    codes, scale_inv = bytes_like(rows, cols), torch.zeros(1)
    other = bytes_like(*((cols, rows) if order == "TRANSPOSED" else (rows, cols)))
    library.quantize(
        *(x, DTYPE_CODES[x.dtype], rows, cols, scale, amax, codes, other),
        *(f"ORDER_{order}", scale_inv, None, DTYPE_CODES[dtype], 0),
    )
    return codes, other, scale_inv


def quantize_current(library, x, dtype, *, epsilon=0.0, power_of_2=False):
    """(rowwise codes, columnwise codes, scale_inv, scale, amax) of the kernel."""
    rows, cols = x.shape
    codes, other = bytes_like(rows, cols), bytes_like(cols, rows)
    scale_inv, scale, amax, workspace = torch.zeros(1), torch.zeros(1), torch.full((1,), 9.0), torch.empty(512)
    library.quantize_current(
        *(x, DTYPE_CODES[x.dtype], rows, cols, scale, amax, epsilon, 2 if power_of_2 else 0, codes, other),
        *("ORDER_TRANSPOSED", scale_inv, None, DTYPE_CODES[dtype], workspace, 2048, 0),
    )
    return codes, other, scale_inv, scale, amax


def assert_cast_equals_reference(library, x, dtype, order="TRANSPOSED"):
    scale, amax, expected_amax = torch.tensor([3.7]), torch.tensor([0.5]), torch.tensor([0.5])
    expected = reference.quantize(
        x, scale, amax=expected_amax, dtype=dtype, columnwise=True, columnwise_order=order.lower()
    )

    codes, other, scale_inv = quantize(library, x, dtype, scale, amax=amax, order=order)

    assert same_bytes(codes, expected.rowwise_data)
    assert same_bytes(other, expected.columnwise_data)
    assert same_bytes(scale_inv, expected.rowwise_scale_inv)
    assert same_bytes(amax, expected_amax)


def assert_current_equals_reference(library, x, dtype, **options):
    amax = reference_amax.amax(x)
    scale = reference_amax.compute_scale(amax, fp8_max=FP8_MAX[dtype], **options)
    expected = reference.quantize(x, scale, dtype=dtype, columnwise=True)

    codes, other, scale_inv, found_scale, found_amax = quantize_current(library, x, dtype, **options)

    assert same_bytes(found_amax, amax)
    assert same_bytes(found_scale, scale)
    assert same_bytes(scale_inv, expected.rowwise_scale_inv)
    assert same_bytes(codes, expected.rowwise_data)
    assert same_bytes(other, expected.columnwise_data)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_both_casts_equal_the_reference_in_every_order_of_threads(library, shape, offset):
    x = tensor_of(shape, torch.bfloat16, offset=offset)

    assert_cast_equals_reference(library, x, E4M3)
    assert_current_equals_reference(library, x, E4M3)


@pytest.mark.parametrize("shape", BIG_SHAPES, ids=str)
def test_large_shapes_equal_the_reference(library, shape):
    x = tensor_of(shape, torch.bfloat16)

    assert_cast_equals_reference(library, x, E4M3)
    assert_current_equals_reference(library, x, E4M3)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("input_dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("order", ["TRANSPOSED", "SAME"])
@pytest.mark.parametrize("shape", [(13, 72), (136, 264)], ids=str)
def test_every_pairing_of_dtypes_equals_the_reference(host_library, dtype, input_dtype, order, shape):
    x = tensor_of(shape, input_dtype)

    assert_cast_equals_reference(host_library, x, dtype, order)


@pytest.mark.parametrize(
    "options", [{"epsilon": 4.0}, {"power_of_2": True}, {"epsilon": 1e3, "power_of_2": True}], ids=str
)
def test_current_scaling_takes_a_floor_and_powers_of_two(host_library, options):
    assert_current_equals_reference(host_library, tensor_of((40, 72), torch.bfloat16, special=False), E4M3, **options)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_every_bf16_value_is_cast_as_in_the_reference(host_library, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)

    for scale in (1.0, 3.7, 2.0**-20):
        expected = reference.quantize(x, torch.tensor([scale]), dtype=dtype)
        assert same_bytes(quantize(host_library, x, dtype, torch.tensor([scale]))[0], expected.rowwise_data)


@pytest.mark.parametrize(
    ("running", "becomes"), [(7.0, 7.0), (0.25, 5.0), (float("nan"), 5.0), (-3.0, 5.0), (float("inf"), float("inf"))]
)
def test_a_running_amax_is_raised_and_a_nan_gives_way(host_library, running, becomes):
    x, amax = torch.tensor([[float("nan"), -5.0]]), torch.tensor([running])

    quantize(host_library, x, E4M3, torch.ones(1), amax=amax)
    alone = torch.tensor([running])
    host_library.amax(x, "FLOAT32", 2, alone, "FLAG_ACCUMULATE", torch.empty(512), 2048, 0)

    assert amax.item() == alone.item() == becomes


@pytest.mark.parametrize("count", [1, 7, 8, 2047, 2048, 100_003])
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_amax_equals_the_reference_at_every_length(library, count, dtype, offset):
    x, found = tensor_of((count,), dtype, offset=offset), torch.full((1,), 9.0)

    library.amax(x, DTYPE_CODES[dtype], count, found, 0, torch.empty(512), 2048, 0)

    assert same_bytes(found, reference_amax.amax(x))


def test_an_empty_tensor_has_amax_zero_and_a_scale_of_one(host_library):
    x, found = torch.empty(0), torch.full((1,), 9.0)
    host_library.amax(x, "FLOAT32", 0, found, 0, torch.empty(512), 2048, 0)
    scale_inv, scale, amax = torch.zeros(1), torch.zeros(1), torch.full((1,), 9.0)
    host_library.quantize_current(
        *(None, "FLOAT32", 0, 16, scale, amax, 0.0, 0, None, None, 0, scale_inv, None),
        *("FLOAT8_E4M3", torch.empty(512), 2048, 0),
    )

    assert (found.item(), amax.item(), scale.item(), scale_inv.item()) == (0.0, 0.0, 1.0, 1.0)


AMAXES = [0.0, float("nan"), float("inf"), 1e-37, 1e-40, 3.0, -2.0, -0.0, 3.4e38, 448.0, 1.1754944e-38]


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 4.0])
@pytest.mark.parametrize("value_for_inf", [3.4028234663852886e38, 65504.0])
def test_compute_scale_equals_the_reference(host_library, power_of_2, epsilon, value_for_inf):
    amax, scale, scale_inv = torch.tensor(AMAXES), torch.zeros(len(AMAXES)), torch.zeros(len(AMAXES))
    expected = reference_amax.compute_scale(
        amax, fp8_max=448.0, epsilon=epsilon, power_of_2=power_of_2, value_for_inf=value_for_inf
    )

    flags = 2 if power_of_2 else 0
    host_library.compute_scale(amax, scale, scale_inv, len(AMAXES), 448.0, epsilon, value_for_inf, flags, 0)

    assert same_bytes(scale, expected)
    assert same_bytes(scale_inv, torch.ones(len(AMAXES)) / expected)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("output_dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("copy", ["rowwise", "transposed"])
@pytest.mark.parametrize("shape", [(256, 256), (13, 77)], ids=str)
def test_decoding_equals_the_reference_for_every_code(host_library, dtype, output_dtype, copy, shape):
    data = torch.arange(256, dtype=torch.int16).to(torch.uint8).repeat(-(-shape[0] * shape[1] // 256))
    data, scale_inv = data[: shape[0] * shape[1]].view(shape), torch.tensor([0.3])
    stored = data.t().contiguous() if copy == "transposed" else data
    output = torch.empty(shape, dtype=output_dtype)

    code = "COPY_COLUMNWISE_TRANSPOSED" if copy == "transposed" else "COPY_ROWWISE"
    host_library.dequantize(
        stored, DTYPE_CODES[dtype], *shape, code, "MODE_TENSOR", scale_inv, 0, 0, output, DTYPE_CODES[output_dtype], 0
    )

    expected = reference.dequantize(_storage(data, dtype, scale_inv), out_dtype=output_dtype)
    assert torch.equal(output.isnan(), expected.isnan())
    assert torch.equal(output.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


def _storage(data, dtype, scale_inv):
    return QuantizedStorage(
        format=element_format(dtype),
        mode=ScalingMode.TENSOR,
        shape=tuple(data.shape),
        dtype=torch.float32,
        rowwise_data=data,
        rowwise_scale_inv=scale_inv,
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposition_moves_every_element(library, dtype, shape):
    x = torch.randint(-100, 100, shape).to(dtype)
    output = torch.empty(shape[::-1], dtype=dtype)

    library.transpose(x, output, *shape, x.element_size(), 0)

    assert torch.equal(output, x.t())
