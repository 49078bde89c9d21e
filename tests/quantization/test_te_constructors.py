"""Quantized tensors built by Transformer Engine's constructor arguments, against torch's own float8 casts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from custom_recipes import BF16, E4M3
from hybrids import hybrid

import te_hal.modules as te
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, UnsupportedError

DTYPES = {"e4m3": (te.DType.kFloat8E4M3, torch.float8_e4m3fn), "e5m2": (te.DType.kFloat8E5M2, torch.float8_e5m2)}
SCALE_INV = 0.25
QUANTIZERS = {
    "delayed": lambda: te.Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1), E4M3),
    "1x128": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "128x128": lambda: te.Float8BlockQuantizer(E4M3),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "nvfp4": te.NVFP4Quantizer,
    "identity": te.IdentityQuantizer,
    "hybrid": lambda: hybrid(("mxfp8", "nvfp4")),
}


def values(rows: int = 32, columns: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))


def float8(**changes: object) -> te.Float8Tensor:
    """One scale, the codes by torch; ``changes`` replace arguments, those of None among them."""
    codes = values().to(torch.float8_e4m3fn).view(torch.uint8)
    arguments = {
        "shape": codes.shape,
        "dtype": torch.float32,
        "data": codes,
        "fp8_dtype": te.DType.kFloat8E4M3,
        "fp8_scale_inv": torch.full((1,), SCALE_INV),
        "data_transpose": None,
        "quantizer": None,
        "requires_grad": False,
        "device": "cpu",
    }
    return te.Float8Tensor(**{**arguments, **changes})


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("transposed", [False, True], ids=["data", "data_transpose"])
def test_a_float8_tensor_of_torchs_codes_has_torchs_values(name: str, *, transposed: bool) -> None:
    dtype, float8_dtype = DTYPES[name]
    plain = values().to(float8_dtype)
    codes = plain.view(torch.uint8)
    given = {"data": None, "data_transpose": codes.t().contiguous()} if transposed else {"data": codes}
    made = float8(**given, fp8_dtype=dtype, requires_grad=True)
    assert made.requires_grad
    assert (made.shape, made.dtype) == (plain.shape, torch.float32)
    assert torch.equal(made.dequantize(), plain.float() * SCALE_INV)


def test_an_mxfp8_tensor_has_the_values_of_its_codes_and_exponents() -> None:
    codes = values(128, 128).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 134, (128, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    made = te.MXFP8Tensor(
        (128, 128),
        torch.float32,
        rowwise_data=codes.view(torch.uint8),
        rowwise_scale_inv=exponents,
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=te.DType.kFloat8E4M3,
        quantizer=None,
        with_gemm_swizzled_scales=False,
    )
    scales = exponents.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(32, axis=1)
    assert torch.equal(made.dequantize(), codes.float() * torch.from_numpy(scales))


@pytest.mark.parametrize("is_2d", [False, True], ids=["1x128", "128x128"])
def test_a_tensor_of_blocks_of_128_has_the_values_of_its_codes_and_scales(*, is_2d: bool) -> None:
    codes = values(128, 128).to(torch.float8_e4m3fn)
    scales = torch.full((1, 4), 0.5) if is_2d else torch.full((1, 128), 0.5)
    made = te.Float8BlockwiseQTensor(
        shape=(128, 128),
        dtype=BF16,
        rowwise_data=codes.view(torch.uint8),
        rowwise_scale_inv=scales,
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=te.DType.kFloat8E4M3,
        quantizer=None,
        is_2D_scaled=is_2d,
    )
    assert torch.equal(made.dequantize(), (codes.float() * 0.5).to(BF16))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_tensor_of_the_metadata_of_another_one_has_its_values_and_takes_writes(name: str) -> None:
    origin = QUANTIZERS[name]()(values().to(BF16))
    metadata = {key: value for key, value in origin.get_metadata().items() if key != "fake_dtype"}
    made = type(origin)(shape=origin.shape, dtype=origin.dtype, device=origin.device, **metadata)
    assert type(made.quantized_storage) is type(origin.quantized_storage)
    assert made.get_usages() == origin.get_usages()
    assert torch.equal(made.dequantize(), origin.dequantize())
    made.quantize_(torch.ones(32, 64, dtype=BF16))
    assert torch.allclose(made.dequantize(), torch.ones(32, 64, dtype=BF16))


def test_a_tensor_of_two_parts_takes_tensors_for_them() -> None:
    row, column = (te.MXFP8Quantizer(E4M3)(values().to(BF16)) for _ in range(2))
    made = te.HybridQuantizedTensor(
        shape=row.shape, dtype=BF16, rowwise_storage=row, columnwise_storage=column, quantizer=None
    )
    assert torch.equal(made.dequantize(), row.dequantize())
    assert made._rowwise_storage.rowwise_data is row._rowwise_data


UNFIT = {
    "shape": ({"shape": (64, 32)}, ArgumentError, "shape"),
    "dtype": ({"dtype": None}, ArgumentTypeError, "dtype"),
    "two dtypes": ({"fake_dtype": BF16}, ArgumentError, "fake_dtype"),
    "device": ({"device": "meta"}, ArgumentError, "device"),
    "no codes": ({"data": None}, ArgumentError, "rowwise"),
    "codes of another dtype": ({"data": torch.zeros(32, 64)}, ArgumentError, "uint8"),
    "scale of another dtype": ({"fp8_scale_inv": torch.ones(1, dtype=BF16)}, ArgumentError, "float32"),
    "scale of another shape": ({"fp8_scale_inv": torch.ones(2)}, ArgumentError, "scale_inv"),
    "transpose of another shape": ({"data_transpose": torch.zeros(32, 64, dtype=torch.uint8)}, ArgumentError, "column"),
    "quantizer of another class": ({"quantizer": te.MXFP8Quantizer(E4M3)}, ArgumentError, "quantizer"),
    "quantizer of another format": (
        {"quantizer": te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2)},
        ArgumentError,
        "quantizer",
    ),
    "unknown": ({"rowwise_data": None}, ArgumentTypeError, "unknown rowwise_data"),
}


@pytest.mark.parametrize(("changes", "error", "names"), UNFIT.values(), ids=UNFIT)
def test_arguments_that_do_not_fit_are_refused_by_name(changes: dict, error: type[Exception], names: str) -> None:
    with pytest.raises(error, match=names):
        float8(**changes)


WRONG = {
    "nothing": te.MXFP8Tensor,
    "no buffers": lambda: te.MXFP8Tensor((32, 64), BF16),
    "a plain tensor": lambda: te.MXFP8Tensor(torch.ones(32, 64)),
    "two shapes": lambda: te.MXFP8Tensor((32, 64), BF16, shape=(32, 64)),
    "a storage and a dtype": lambda: te.Float8Tensor(float8().quantized_storage, BF16),
    "no class of Transformer Engine's": lambda: te.MTFP8Tensor((32, 64), BF16),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_calls_that_say_too_little_or_too_much_are_refused(call: object) -> None:
    with pytest.raises(ArgumentTypeError, match="Tensor"):
        call()


def test_parts_of_two_tensors_are_refused() -> None:
    row, column = (te.MXFP8Quantizer(E4M3)(values(rows)) for rows in (32, 64))
    with pytest.raises(ArgumentError, match="columnwise_storage"):
        te.HybridQuantizedTensor(
            shape=row.shape, dtype=BF16, rowwise_storage=row, columnwise_storage=column, quantizer=None
        )


@pytest.mark.parametrize("name", ["delayed", "1x128", "128x128", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("way", ["rowwise", "columnwise"])
def test_none_assigned_to_codes_drops_that_copy_alone(name: str, way: str) -> None:
    made = QUANTIZERS[name]()(values().to(BF16))
    made.update_usage(rowwise_usage=True, columnwise_usage=True)
    other = "columnwise" if way == "rowwise" else "rowwise"
    kept = getattr(made, f"_{other}_data")
    setattr(made, f"_{way}_data", None)
    assert made.get_usages() == {way: False, other: True}
    assert getattr(made, f"_{way}_data") is None
    assert getattr(made, f"_{other}_data") is kept
    assert made.shape == (32, 64)
    with pytest.raises(UnsupportedError, match="last copy"):
        setattr(made, f"_{other}_data", None)
    with pytest.raises(UnsupportedError, match="without their scales"):
        setattr(made, f"_{other}_data", kept.clone())


def test_float8_names_drop_copies_too() -> None:
    made = float8(data_transpose=values().to(torch.float8_e4m3fn).view(torch.uint8).t().contiguous())
    before = made.dequantize()
    made._data = None
    assert torch.equal(made.dequantize(), before)
    with pytest.raises(UnsupportedError, match="last copy"):
        made._transpose = None
