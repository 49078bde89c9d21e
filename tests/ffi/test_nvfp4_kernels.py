"""Casts to and from NVFP4 at the entries, in buffers of just the size, against loops with ml_dtypes."""

from __future__ import annotations

import nvfp4_by_hand
import pytest
import torch
from native_cases import DTYPE_CODES, PLAIN_DTYPES, bytes_like, same_bytes, tensor_of

SHAPES = [(16, 16), (32, 208), (144, 32)]
MODES = ("MODE_NVFP4", "MODE_NVFP4_16X16", "MODE_NVFP4_HADAMARD")
FILLED = 0xAA


def scales_of(lines, length):
    """A scale_inv buffer to be written: fp32 words, the last of them the amax."""
    pitch = -(-(length // 16) // 4) * 4
    return torch.full((-(-lines // 128) * 128 * pitch + 4,), FILLED, dtype=torch.uint8), pitch


def quantize(library, x, mode, *, flags=0, seed=(0, 0), copies=("rowwise", "columnwise")):
    """{copy: (packed codes [lines, elements / 2], scales [lines, blocks], amax)}, and the buffers as they are."""
    rows, cols = x.shape
    arguments, written, buffers = [], {}, {}
    for copy, (lines, length) in {"rowwise": (rows, cols), "columnwise": (cols, rows)}.items():
        if copy not in copies:
            arguments += [None, None]
            continue
        codes, (buffer, pitch) = bytes_like(lines, length // 2), scales_of(lines, length)
        arguments += [codes, buffer]
        buffers[copy] = buffer
        grid = buffer[:-4].view(-1, pitch)[:lines, : length // 16]
        written[copy] = (codes, grid, buffer[-4:].view(torch.float32))
    library.quantize_nvfp4(
        x, DTYPE_CODES[x.dtype], rows, cols, mode, flags, *seed, *arguments, torch.empty(1024), 4096, 0
    )
    return written, buffers


def assert_copy(written, expected):
    codes, scales, amax = written
    assert same_bytes(scales, torch.from_numpy(expected.scales))
    assert same_bytes(codes, expected.packed())
    assert amax.item() == expected.amax


def quarters(shape):
    """Numbers whose transform fp32 computes exactly."""
    return (torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(1)) / 4).bfloat16()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_copies_equal_loops_and_padding_stays(library, mode, shape):
    hadamard = mode == "MODE_NVFP4_HADAMARD"
    x = quarters(shape) if hadamard else tensor_of(shape, torch.bfloat16, special=False)

    written, buffers = quantize(library, x, mode)

    square = mode == "MODE_NVFP4_16X16"
    assert_copy(written["rowwise"], nvfp4_by_hand.cast(x, square=square))
    lines = nvfp4_by_hand.hadamard(x.t()) if hadamard else x.t()
    assert_copy(written["columnwise"], nvfp4_by_hand.cast(lines.contiguous(), square=square))
    for copy, buffer in buffers.items():
        written[copy][1].fill_(FILLED)
        assert set(buffer[:-4].tolist()) == {FILLED}


@pytest.mark.parametrize("input_dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
def test_every_dtype_and_alignment_gives_the_same_rules(host_library, input_dtype, offset, copy):
    x = tensor_of((32, 48), input_dtype, offset=offset)

    written, _ = quantize(host_library, x, "MODE_NVFP4", copies=(copy,))

    assert_copy(written[copy], nvfp4_by_hand.cast(x if copy == "rowwise" else x.t().contiguous()))


def test_chance_gives_one_of_the_two_neighbours_and_follows_from_the_seed(library):
    x = tensor_of((32, 208), torch.bfloat16, special=False)
    nearest, _ = quantize(library, x, "MODE_NVFP4")

    first, again, other = (
        quantize(library, x, "MODE_NVFP4", flags="FLAG_BY_CHANCE", seed=seed)[0] for seed in ((1, 2), (1, 2), (1, 3))
    )

    for copy in ("rowwise", "columnwise"):
        assert same_bytes(first[copy][0], again[copy][0])
        assert not same_bytes(first[copy][0], other[copy][0])
        assert same_bytes(first[copy][1], nearest[copy][1])
        for shift in (0, 4):
            a, b = ((made[copy][0] >> shift & 7).int() for made in (first, nearest))
            assert (a - b).abs().max() == 1


@pytest.mark.parametrize("flags", [0, "FLAG_UNSCALED"])
@pytest.mark.parametrize("output_dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
def test_decoding_multiplies_each_code_by_its_scales(library, copy, output_dtype, flags):
    x = tensor_of((48, 144), torch.bfloat16, special=False)
    written, buffers = quantize(library, x, "MODE_NVFP4", copies=(copy,))
    codes, scales, amax = written[copy]
    code = "COPY_ROWWISE" if copy == "rowwise" else "COPY_COLUMNWISE_TRANSPOSED"
    output = torch.empty(49 * 144 + 1, dtype=output_dtype)[1 : 1 + 48 * 144].view(48, 144)

    library.dequantize_nvfp4(
        codes, 48, 144, code, "MODE_NVFP4", buffers[copy], flags, output, DTYPE_CODES[output_dtype], 0
    )

    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    factors = scales.contiguous().view(torch.float8_e4m3fn).float()
    factors = factors if flags else factors * amax * torch.tensor(1 / 2688)
    expected = (values * factors.repeat_interleave(16, 1)).to(output_dtype)
    assert same_bytes(output, expected if copy == "rowwise" else expected.t())


def test_a_transformed_copy_is_transformed_back(library):
    x = quarters((32, 144))
    written, buffers = quantize(library, x, "MODE_NVFP4_HADAMARD", copies=("columnwise",))
    output = torch.empty(32, 144)

    library.dequantize_nvfp4(
        written["columnwise"][0], 32, 144, 1, "MODE_NVFP4_HADAMARD", buffers["columnwise"], 0, output, "FLOAT32", 0
    )

    lines = torch.from_numpy(nvfp4_by_hand.cast(nvfp4_by_hand.hadamard(x.t())).values())
    matrix = nvfp4_by_hand.hadamard(torch.eye(16)).double()
    back = (lines.view(144, 2, 16) @ matrix.t()).view(144, 32).t()
    assert (output.double() - back).abs().max() <= 1e-6 * back.abs().max()
