"""Decoding of codes against ml_dtypes: every code, every length and offset that the paired look-up could trip over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8_codes import values_of

from te_hal.backends.cpu_reference import decode as decode_module
from te_hal.backends.cpu_reference.decode import decode
from te_hal.schema.formats import E4M3, E5M2, ElementFormat

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda fmt: fmt.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def assert_decodes(codes: torch.Tensor, format: ElementFormat, dtype: torch.dtype) -> None:
    found = decode(codes, format, dtype)
    assert found.dtype == dtype
    assert found.is_contiguous()
    expected = values_of(codes, format)
    assert np.array_equal(found.float().numpy(), expected, equal_nan=True)
    assert np.array_equal(found.signbit().numpy() | np.isnan(expected), np.signbit(expected) | np.isnan(expected))


@FORMATS
@DTYPES
def test_every_pair_of_codes_decodes_exactly(format: ElementFormat, dtype: torch.dtype) -> None:
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    assert_decodes(pairs, format, dtype)


@FORMATS
@pytest.mark.parametrize("length", [0, 1, 2, 3, 15, 16, 17, 100])
def test_any_length_and_any_offset_decodes(format: ElementFormat, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "_PIECE", 8)
    codes = torch.randint(0, 256, (128,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for offset in range(4):
        assert_decodes(codes[offset : offset + length], format, torch.bfloat16)


@FORMATS
def test_any_stride_decodes_to_contiguous_values(format: ElementFormat) -> None:
    codes = torch.randint(0, 256, (6, 8, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for view in (codes.permute(2, 0, 1), codes[:, ::2], codes[..., 1:], codes[0, 0, 0], codes[:, :0]):
        assert_decodes(view, format, torch.float32)


@FORMATS
@DTYPES
@pytest.mark.parametrize("offset", [0, 1])
def test_out_is_filled_to_its_ends_and_returned(format: ElementFormat, dtype: torch.dtype, offset: int) -> None:
    codes = torch.randint(0, 256, (5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    buffer = torch.full((60,), 0.25, dtype=dtype)
    out = buffer[offset : offset + 35].view(5, 7)
    assert decode(codes, format, dtype, out=out) is out
    assert np.array_equal(out.float().numpy(), values_of(codes, format), equal_nan=True)
    assert buffer[:offset].eq(0.25).all()
    assert buffer[offset + 35 :].eq(0.25).all()


def test_the_table_is_made_on_the_cpu_whatever_the_default_device() -> None:
    decode_module._pairs.cache_clear()
    codes = torch.tensor([0x38, 0xB8], dtype=torch.uint8)
    with torch.device("meta"):
        assert decode(codes, E4M3, torch.float32).tolist() == [1.0, -1.0]
