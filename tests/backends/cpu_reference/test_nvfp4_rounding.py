"""Rounding to E2M1: to the nearest against ml_dtypes, and by chance against what chance should give."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from te_hal import ops
from te_hal.backends.cpu_reference.fp4_codes import encode_magnitudes, round_stochastically
from te_hal.backends.cpu_reference.philox import philox
from te_hal.schema.block_scales import block_copy
from te_hal.schema.formats import E2M1, ScalingMode
from te_hal.schema.nvfp4_layout import pack, unpack

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DRAWS = 1_000_000
MODES = pytest.mark.parametrize("mode", ["nvfp4", "nvfp4_hadamard"])


def test_the_nearest_code_is_that_of_ml_dtypes() -> None:
    near = [torch.nextafter(TIES, torch.tensor(to)) for to in (0.0, 9.0)]
    x = torch.cat([torch.linspace(0, 6, 100_001), TIES, *near, torch.tensor([1e-45, 0.25000006])])
    expected = torch.from_numpy(x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8).copy())
    assert torch.equal(encode_magnitudes(x.clone(), torch.empty_like(x), torch.empty_like(x)), expected)


def test_packing_puts_the_even_element_low() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    assert pack(codes)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(unpack(pack(codes)), codes)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_numbers_that_its_authors_publish(
    counter: tuple[int, ...], key: int, words: tuple[int, ...]
) -> None:
    low, high = torch.tensor([counter[0]]), torch.tensor([counter[1]])
    assert tuple(word.item() for word in philox(low, high, (counter[2], counter[3]), key)) == words


def cast(x: torch.Tensor, mode: str = "nvfp4", **flags: object) -> torch.Tensor:
    """Values of the rowwise copy, in units of the tensor's scale."""
    storage = ops.quantize(x, dtype=E2M1.dtype, mode=mode, **flags)  # type: ignore[arg-type]
    return ops.dequantize(storage, out_dtype=torch.float32)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.499, 0.75, 1.0, 1.9, 2.0001, 2.3, 3.99, 4.1, 5.0, 5.9])
def test_chance_is_without_bias(value: float) -> None:
    """A million draws of one value beside a 6 in each block, which keeps all scales at 1: the mean is the value."""
    x = torch.full((DRAWS // 15 // 16 * 16, 16), value)
    x[:, 0] = 6.0
    found = cast(x, rounding_seed=11)[:, 1:].double() / 1.0
    below = max(number for number in GRID if number <= value)
    above = min(number for number in GRID if number >= value)
    assert set(found.unique().tolist()) <= {below, above}
    deviation = ((value - below) * (above - value)) ** 0.5
    error = abs(found.mean().item() - torch.tensor(value).item())
    assert error <= 4 * deviation / found.numel() ** 0.5 + 1e-9


def test_any_draw_rounds_up_exactly_where_it_lies_below_the_distance() -> None:
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 6
    draws = torch.rand(4096, generator=torch.Generator().manual_seed(1))
    found = round_stochastically(x.clone(), draws)
    grid = torch.tensor(GRID)
    index = (torch.bucketize(x, grid, right=True) - 1).clamp(max=6)
    below, above = grid[index].double(), grid[index + 1].double()
    expected = torch.where((x.double() - below) / (above - below) > draws.double(), above, below)
    assert torch.equal(found.double(), expected)


@MODES
def test_a_seed_gives_the_same_bytes_again_and_another_seed_others(mode: str) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).bfloat16()

    def made(seed: int) -> list[torch.Tensor]:
        storage = ops.quantize(x, dtype=E2M1.dtype, mode=mode, columnwise=True, rounding_seed=seed)  # type: ignore[arg-type]
        return [t for t in storage.tensors()[::2] if t is not None]

    assert all(map(torch.equal, made(5), made(5)))
    for other in (6, 5 + 2**32, 0):
        assert not any(map(torch.equal, made(5), made(other)))


@MODES
def test_the_number_of_threads_does_not_show(mode: str) -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(4)).bfloat16()
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(ops.quantize(x, dtype=E2M1.dtype, mode=mode, columnwise=True, rounding_seed=9))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, other.tensors()[::2], found[0].tensors()[::2]))


def test_draws_differ_between_the_copies_and_between_the_elements() -> None:
    x = torch.full((256, 256), 1.25)  # midway between two codes
    x[::16] = 6.0
    x[:, ::16] = 6.0
    storage = ops.quantize(x, dtype=E2M1.dtype, mode=ScalingMode.NVFP4, columnwise=True, rounding_seed=3)
    rows = unpack(block_copy(storage, rowwise=True).codes)
    columns = unpack(block_copy(storage, rowwise=False).codes).t()
    inside = torch.arange(256) % 16 != 0
    up, other = ((codes == 3).double()[inside][:, inside] * 2 - 1 for codes in (rows, columns))
    neighbours = [up.roll(by, dim) for by in (1, 2, 7, 8) for dim in (0, 1)]
    for second in (other, up.t(), *neighbours):
        assert abs((up * second).mean().item()) < 5 / up.numel() ** 0.5


def test_the_nearest_stays_the_nearest_where_no_seed_is_given() -> None:
    x = torch.full((16, 16), 0.3)
    x[:, 0] = 6.0
    assert cast(x)[:, 1:].unique().tolist() == [0.5]
