"""Casts with a scale per block, against a loop over the blocks in plain torch."""

import itertools

import pytest
import torch
from native_cases import DTYPE_CODES, FP8_DTYPES, FP8_MAX, PLAIN_DTYPES, bytes_like, same_bytes, tensor_of

E4M3 = torch.float8_e4m3fn
LARGEST = {torch.float32: 3.4028234663852886e38, torch.float16: 65504.0, torch.bfloat16: 3.3895313892515355e38}
#: (rows, columns) of a block, for the rowwise and the columnwise copy.
BLOCKS = {
    "MODE_BLOCK_1X128": ((1, 128), (128, 1)),
    "MODE_BLOCK_128X128": ((128, 128), (128, 128)),
    "MODE_MXFP8": ((1, 32), (32, 1)),
    "MODE_MTFP8_1X128": ((1, 128), (128, 1)),
    "MODE_MTFP8_128X128": ((128, 128), (128, 128)),
}


def block_amax(block):
    finite = block.float().abs()
    finite = finite[~finite.isnan()]
    return finite.max() if finite.numel() else torch.tensor(0.0)


def float_scale(amax, fp8_max, input_dtype, epsilon, power_of_2):
    amax = torch.maximum(amax, torch.tensor(epsilon))
    if amax == 0 or amax.isinf():
        scale = torch.tensor(1.0)
    else:
        scale = torch.tensor(fp8_max) / amax
        scale = torch.tensor(LARGEST[input_dtype]) if scale.isinf() else scale
    if power_of_2:
        scale = torch.ldexp(torch.tensor(1.0), torch.frexp(scale).exponent - 1)
    return scale, torch.tensor(1.0) / scale


def e8m0_scale(amax, fp8_max):
    """The smallest power of two, 2^-127 or more, that is not below the fp32 product amax * (1 / fp8_max)."""
    if amax.isinf():
        return torch.tensor(2.0**-127), 254
    target = (amax * torch.tensor(1.0 / fp8_max)).double()
    exponent = -127
    while 2.0**exponent < target:
        exponent += 1
    return torch.tensor(2.0**-exponent), exponent + 127


def encode(block, scale, dtype):
    scaled = block.float() * scale
    nan = scaled.isnan()
    codes = scaled.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype).view(torch.uint8)
    return torch.where(nan, torch.tensor(0x7F, dtype=torch.uint8), codes)


def brute_force(x, mode, shape, dtype, epsilon=0.0, power_of_2=False):
    """(codes, scale_inv grid) of one copy."""
    rows, cols = x.shape
    down, along = -(-rows // shape[0]), -(-cols // shape[1])
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    grid = torch.empty(down, along, dtype=torch.uint8 if mode == "MODE_MXFP8" else torch.float32)
    for i, j in itertools.product(range(down), range(along)):
        part = (slice(i * shape[0], (i + 1) * shape[0]), slice(j * shape[1], (j + 1) * shape[1]))
        amax = block_amax(x[part])
        if mode.startswith("MODE_MTFP8"):
            grid[i, j] = torch.maximum(amax, torch.tensor(1e-15)) * torch.tensor(1.0 / FP8_MAX[dtype])
            codes[part] = encode(x[part].float() / grid[i, j], 1.0, dtype)
            continue
        if mode == "MODE_MXFP8":
            scale, grid[i, j] = e8m0_scale(amax, FP8_MAX[dtype])
        else:
            scale, grid[i, j] = float_scale(amax, FP8_MAX[dtype], x.dtype, epsilon, power_of_2)
        codes[part] = encode(x[part], scale, dtype)
    return codes, grid


def grid_like(x, mode, shape, *, transposed=False, padding=0):
    """An empty grid of scale_invs, its strides, and a view of it as [down, along]."""
    down, along = -(-x.shape[0] // shape[0]), -(-x.shape[1] // shape[1])
    kind = torch.uint8 if mode == "MODE_MXFP8" else torch.float32
    room = torch.full((along, down + padding) if transposed else (down, along + padding), 85, dtype=kind)
    view = room[:, :down].t() if transposed else room[:, :along]
    return room, (view.stride(0) or 1, view.stride(1) or 1), view


def quantize_blocks(library, x, mode, dtype, *, copies="both", order="TRANSPOSED", epsilon=0.0, flags=0, **grids):
    """What the kernel wrote: {"rowwise": (codes, grid), "columnwise": ...}, codes in x's shape."""
    rows, cols = x.shape
    arguments, written = [], {}
    for copy, shape in zip(("rowwise", "columnwise"), BLOCKS[mode], strict=True):
        if copies not in ("both", copy):
            arguments += [None, None, 0, 0]
            continue
        turned = copy == "columnwise" and order == "TRANSPOSED"
        codes = bytes_like(*((cols, rows) if turned else (rows, cols)))
        room, strides, view = grid_like(x, mode, shape, **grids)
        arguments += [codes, room, *strides]
        written[copy] = (codes.t() if turned else codes, view)
    library.quantize_blocks(
        x, DTYPE_CODES[x.dtype], rows, cols, mode, epsilon, flags, *arguments, f"ORDER_{order}", DTYPE_CODES[dtype], 0
    )
    return written


def assert_copies_equal(written, x, mode, dtype, **options):
    for copy, shape in zip(("rowwise", "columnwise"), BLOCKS[mode], strict=True):
        if copy in written:
            codes, grid = brute_force(x, mode, shape, dtype, **options)
            assert same_bytes(written[copy][1], grid), copy
            assert same_bytes(written[copy][0], codes), copy


@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (13, 72), (136, 264), (129, 257)], ids=str)
def test_both_copies_equal_a_loop_over_the_blocks(library, mode, shape):
    x = tensor_of(shape, torch.bfloat16)

    assert_copies_equal(quantize_blocks(library, x, mode, E4M3), x, mode, E4M3)


@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("input_dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_every_dtype_and_alignment_gives_the_same_rules(host_library, mode, dtype, input_dtype, offset):
    x = tensor_of((40, 136), input_dtype, offset=offset)

    assert_copies_equal(quantize_blocks(host_library, x, mode, dtype), x, mode, dtype)


@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize("order", ["TRANSPOSED", "SAME"])
@pytest.mark.parametrize("copies", ["rowwise", "columnwise", "both"])
def test_each_copy_comes_alone_or_with_the_other_in_either_order(host_library, mode, order, copies):
    x = tensor_of((136, 264), torch.bfloat16)

    written = quantize_blocks(host_library, x, mode, E4M3, copies=copies, order=order)

    assert set(written) == ({"rowwise", "columnwise"} if copies == "both" else {copies})
    assert_copies_equal(written, x, mode, E4M3)


@pytest.mark.parametrize("mode", ["MODE_BLOCK_1X128", "MODE_BLOCK_128X128"])
@pytest.mark.parametrize(("epsilon", "flags"), [(0.0, 2), (4.0, 0), (4.0, 2)])
def test_epsilon_is_a_floor_and_power_of_2_rounds_down(host_library, mode, epsilon, flags):
    x = tensor_of((136, 264), torch.float16)

    written = quantize_blocks(host_library, x, mode, E4M3, epsilon=epsilon, flags=flags)

    assert_copies_equal(written, x, mode, E4M3, epsilon=epsilon, power_of_2=flags == 2)


@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize("transposed", [False, True])
def test_scales_land_by_their_strides_and_padding_stays_untouched(host_library, mode, transposed):
    x = tensor_of((136, 264), torch.bfloat16)

    written = quantize_blocks(host_library, x, mode, E4M3, transposed=transposed, padding=3)

    assert_copies_equal(written, x, mode, E4M3)
    for copy, shape in zip(("rowwise", "columnwise"), BLOCKS[mode], strict=True):
        grid = written[copy][1]
        used = -(-x.shape[0 if transposed else 1] // shape[0 if transposed else 1])
        padding = (grid.t() if transposed else grid)._base[:, used:]
        assert torch.all(padding == 85), copy


@pytest.mark.parametrize(
    ("amax", "biased"), [(448.0, 127), (449.0, 128), (150.0, 126), (960.0, 129), (0.0, 0)], ids=str
)
def test_an_mxfp8_scale_is_rounded_up_so_that_nothing_saturates(host_library, amax, biased):
    x = torch.zeros(1, 32)
    x[0, 3] = amax

    assert quantize_blocks(host_library, x, "MODE_MXFP8", E4M3, copies="rowwise")["rowwise"][1].item() == biased


def test_957_in_an_mxfp8_block_of_amax_960_decodes_to_960(host_library):
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 960.0, -957.0

    codes, grid = quantize_blocks(host_library, x, "MODE_MXFP8", E4M3, copies="rowwise")["rowwise"]
    output = torch.empty(1, 32)
    library_arguments = (1, 32, "COPY_ROWWISE", "MODE_MXFP8", grid, 1, 1, output, "FLOAT32", 0)
    host_library.dequantize(codes, "FLOAT8_E4M3", *library_arguments)

    assert output[0, :2].tolist() == [960.0, -960.0]


@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize("copy", ["rowwise", "transposed", "same"])
@pytest.mark.parametrize("output_dtype", PLAIN_DTYPES, ids=str)
def test_decoding_multiplies_each_code_by_its_blocks_scale_inv(host_library, mode, copy, output_dtype):
    x = tensor_of((136, 264), torch.bfloat16, special=False)
    copies = "rowwise" if copy == "rowwise" else "columnwise"
    order = "SAME" if copy == "same" else "TRANSPOSED"
    codes, grid = quantize_blocks(host_library, x, mode, E4M3, copies=copies, order=order)[copies]
    code = {"rowwise": "ROWWISE", "transposed": "COLUMNWISE_TRANSPOSED", "same": "COLUMNWISE_SAME"}[copy]
    output = torch.empty(x.shape, dtype=output_dtype)

    stored = codes.t() if copy == "transposed" else codes
    host_library.dequantize(
        stored, "FLOAT8_E4M3", 136, 264, f"COPY_{code}", mode, grid, *grid.stride(), output,
        DTYPE_CODES[output_dtype], 0,
    )  # fmt: skip

    shape = BLOCKS[mode][copies == "columnwise"]
    factors = torch.ldexp(torch.ones(grid.shape), grid.int() - 127) if mode == "MODE_MXFP8" else grid
    spread = factors.repeat_interleave(shape[0], 0).repeat_interleave(shape[1], 1)[:136, :264]
    assert same_bytes(output, (codes.contiguous().view(E4M3).float() * spread).to(output_dtype))
