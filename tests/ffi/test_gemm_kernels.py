"""The portable gemm and bias_grad against float64, operand by operand: every type, format, copy, mode and layout."""

import itertools

import pytest
import torch
from closeness import relative_error
from emulator_orders import ORDERS
from fp8_codes import values_of
from native_cases import DTYPE_CODES, FP8_DTYPES, PLAIN_DTYPES, same_bytes
from native_ops import bias_grad, poisoned, workspace

from te_hal.schema.formats import element_format
from te_hal.schema.gemm import BIAS_GRAD, GEMM

BOUND, SUMS = GEMM.contract.bound, BIAS_GRAD.contract.bound
LAYOUTS = ("FPROP", "DGRAD", "WGRAD")
#: M, N, K: one element, odd, tiles and steps cut short, several tiles.
SIZES = ((1, 1, 1), (5, 7, 9), (64, 64, 64), (130, 70, 100), (1, 8, 300), (136, 264, 136))
COPIES = ("ROWWISE", "COLUMNWISE_TRANSPOSED", "COLUMNWISE_SAME")
MODES = ("TENSOR", "BLOCK_1X128", "BLOCK_128X128", "MXFP8")


class Plain:
    """A tensor as an operand: its float64 values, and the arguments that name it."""

    def __init__(self, rows, cols, dtype, *, seed=0, offset=0):
        values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed + rows))
        room = torch.empty(rows * cols + offset, dtype=dtype)
        self.data = room[offset:].view(rows, cols).copy_(values)
        self.values = self.data.double()
        self.arguments = (self.data, DTYPE_CODES[dtype], 0, 0, None, 0, 0)


class Quantized:
    """The same with random codes in one copy, and random scales of the mode."""

    def __init__(self, rows, cols, dtype, copy="ROWWISE", mode="TENSOR", *, seed=0):
        generator = torch.Generator().manual_seed(seed + cols)
        codes = torch.randn(rows, cols, generator=generator).to(dtype).view(torch.uint8)
        self.data = codes.t().contiguous() if copy == "COLUMNWISE_TRANSPOSED" else codes
        decoded = torch.from_numpy(values_of(codes, element_format(dtype))).double()
        factors, self.scales, strides = self._scales(rows, cols, copy, mode, generator)
        self.values = decoded * factors
        self.arguments = (
            *(self.data, DTYPE_CODES[dtype], f"COPY_{copy}", f"MODE_{mode}", self.scales),
            *strides,
        )

    @staticmethod
    def _scales(rows, cols, copy, mode, generator):
        """(factor of each element, what lies in memory, strides); one number between neighbours is not a scale."""
        if mode == "TENSOR":
            scale = torch.rand(1, generator=generator) + 0.5
            return scale.double(), scale, (0, 0)
        length = 32 if mode == "MXFP8" else 128
        down, along = (1, length) if copy == "ROWWISE" else (length, 1)
        if mode == "BLOCK_128X128":
            down = along = 128
        grid = (-(-rows // down), -(-cols // along))
        exponents = torch.randint(120, 134, grid, generator=generator)
        factors = torch.exp2(exponents - 127.0) if mode == "MXFP8" else torch.rand(grid, generator=generator) + 0.5
        stored = torch.full((grid[0], 2 * grid[1] + 3), 255 if mode == "MXFP8" else float("nan"))
        stored = stored.to(torch.uint8 if mode == "MXFP8" else torch.float32)
        stored[:, : 2 * grid[1] : 2] = (exponents if mode == "MXFP8" else factors).to(stored.dtype)
        spread = factors.double().repeat_interleave(down, 0)[:rows].repeat_interleave(along, 1)[:, :cols]
        return spread, stored, (stored.stride(0), 2)


def shapes(layout, m, n, k):
    return (m, k) if layout == "FPROP" else (m, n), (m, k) if layout == "WGRAD" else (n, k)


def product(layout, a, b):
    return {"FPROP": lambda: a @ b.t(), "DGRAD": lambda: a @ b, "WGRAD": lambda: a.t() @ b}[layout]()


def gemm(library, layout, a, b, m, n, k, *, bias=None, out=None, out_dtype=torch.float32):
    """The kernel's result; added to ``out`` where that is given."""
    shape = product(layout, torch.empty(a.values.shape), torch.empty(b.values.shape)).shape
    result = poisoned(*shape, dtype=out_dtype) if out is None else out.clone()
    scratch = workspace(library, "OP_GEMM", *shape, kind=f"LAYOUT_{layout}")
    library.gemm(
        *(f"LAYOUT_{layout}", m, n, k, *a.arguments, *b.arguments, bias),
        *(0 if bias is None else DTYPE_CODES[bias.dtype], result, DTYPE_CODES[result.dtype]),
        *(0 if out is None else "FLAG_ACCUMULATE", *scratch, 0),
    )
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_right_in_every_order_of_threads(library, layout, size):
    of_a, of_b = shapes(layout, *size)
    a, b = Plain(*of_a, torch.bfloat16), Quantized(*of_b, torch.float8_e4m3fn)

    result = gemm(library, layout, a, b, *size)

    assert relative_error(result, product(layout, a.values, b.values)) <= BOUND[torch.float32]


OPERANDS = {str(dtype).removeprefix("torch."): lambda *s, d=dtype, **o: Plain(*s, d, **o) for dtype in PLAIN_DTYPES}
OPERANDS |= {
    f"{str(dtype).removeprefix('torch.float8_')}-{copy}-{mode}".lower(): lambda *s, f=(dtype, copy, mode), **o: (
        Quantized(*s, *f, **o)
    )
    for dtype, copy, mode in itertools.product(FP8_DTYPES, COPIES, MODES)
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", OPERANDS)
def test_every_operand_pairs_with_every_other(host_library, layout, first):
    m, n, k = 37, 140, 136
    of_a, of_b = shapes(layout, m, n, k)
    a = OPERANDS[first](*of_a)
    for second in OPERANDS:
        b = OPERANDS[second](*of_b, seed=1)

        result = gemm(host_library, layout, a, b, m, n, k)

        error = relative_error(result, product(layout, a.values, b.values))
        assert error <= BOUND[torch.float32], second


@pytest.mark.parametrize("out_dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_bias_and_old_content_are_added_before_one_rounding(host_library, out_dtype, bias_dtype, accumulate):
    a, b = Quantized(24, 72, torch.float8_e4m3fn), Quantized(40, 72, torch.float8_e5m2)
    bias, old = torch.randn(40).to(bias_dtype), (10 * torch.randn(24, 40)).to(out_dtype)
    exact = a.values @ b.values.t() + bias.double() + (old.double() if accumulate else 0.0)

    out = old if accumulate else None
    result = gemm(host_library, "FPROP", a, b, 24, 40, 72, bias=bias, out=out, out_dtype=out_dtype)

    assert relative_error(result, exact) <= BOUND[out_dtype]


def test_large_tiles_are_right(host_library):
    a, b = Plain(1100, 40, torch.bfloat16), Plain(1050, 40, torch.float16, seed=1)

    result = gemm(host_library, "FPROP", a, b, 1100, 1050, 40)

    assert relative_error(result, a.values @ b.values.t()) <= BOUND[torch.float32]


@pytest.mark.parametrize(
    ("scales", "expected"),
    [((1e30, 1e30), 0.0), ((1e30, 1e-30), 64.0), ((2.0**-100, 2.0**-100), 0.0), ((3e38, 1e-38), 192.0)],
)
def test_scales_whose_product_leaves_the_range_keep_zero_and_what_is_representable(host_library, scales, expected):
    """G3: one factor where it is normal, else one after the other, larger first."""
    codes = 0x38 if expected else 0x00  # 1 and 0
    a, b = (Quantized(8, 64, torch.float8_e4m3fn) for _ in range(2))
    for operand, scale in zip((a, b), scales, strict=True):
        operand.data.fill_(codes)
        operand.scales.fill_(scale)

    result = gemm(host_library, "FPROP", a, b, 8, 8, 64)

    assert torch.allclose(result, torch.tensor(expected))


def test_nan_and_infinity_reach_the_elements_that_they_are_part_of(host_library):
    a, b = Plain(8, 16, torch.float32), Plain(8, 16, torch.float32, seed=1)
    a.data[1, 2], b.data[3, 4] = float("nan"), float("inf")

    result = gemm(host_library, "FPROP", a, b, 8, 8, 16)

    assert result[1].isnan().all()
    assert result[[0, 2, 4], 3].isinf().all()
    assert result[[0, 2, 4]][:, [0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
def test_the_bytes_do_not_depend_on_addresses_and_orders(host_library, order):
    size = (70, 40, 72)
    expected = gemm(host_library, "FPROP", Plain(70, 72, torch.bfloat16), Plain(40, 72, torch.bfloat16), *size)

    host_library.configure_emulator(*ORDERS[order])
    a, b = Plain(70, 72, torch.bfloat16, offset=1), Plain(40, 72, torch.bfloat16, offset=3)

    assert same_bytes(gemm(host_library, "FPROP", a, b, *size), expected)


def test_a_sum_over_nothing_is_the_bias(host_library):
    a, b, bias = Plain(3, 0, torch.float32), Plain(5, 0, torch.float32), torch.randn(5)

    assert torch.equal(gemm(host_library, "FPROP", a, b, 3, 5, 0, bias=bias), bias.expand(3, 5))


@pytest.mark.parametrize("shape", [(1, 1), (13, 72), (129, 257), (600, 40), (3, 1000)], ids=str)
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_a_bias_gradient_is_the_sum_of_rows(library, shape, dtype, offset):
    grad = Plain(*shape, dtype, offset=offset).data

    sums = bias_grad(library, grad, out_dtype=torch.float32)

    exact = grad.double().sum(0)
    assert (sums - exact).norm() <= SUMS[torch.float32] * grad.double().abs().sum(0).norm()
    assert same_bytes(bias_grad(library, grad), sums.to(dtype))


def test_the_bias_gradient_of_no_rows_is_zero(host_library):
    assert (bias_grad(host_library, torch.empty(0, 40)) == 0.0).all()
