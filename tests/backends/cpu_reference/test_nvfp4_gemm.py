"""Products of NVFP4 operands against float64, from values that loops give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nvfp4_by_hand
import pytest
import torch
from closeness import relative_error

from te_hal import ops
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import E2M1, E4M3
from te_hal.schema.gemm import GEMM

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage

SHAPES = {"fprop": ((32, 64), (48, 64)), "dgrad": ((32, 48), (48, 64)), "wgrad": ((32, 48), (32, 64))}
PAIRS = [
    ("fprop", "nvfp4", "nvfp4"),
    ("fprop", "nvfp4_hadamard", "nvfp4_16x16"),
    ("dgrad", "nvfp4", "nvfp4"),
    ("dgrad", "nvfp4_hadamard", "nvfp4_16x16"),
    ("dgrad", "nvfp4_hadamard", "nvfp4"),
    ("wgrad", "nvfp4", "nvfp4"),
    ("wgrad", "nvfp4_hadamard", "nvfp4_hadamard"),
]


def operand(x: torch.Tensor, mode: str, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedStorage:
    return ops.quantize(x, dtype=E2M1.dtype, mode=mode, rowwise=rowwise, columnwise=columnwise)  # type: ignore[arg-type]


def values(x: torch.Tensor, mode: str, *, columnwise: bool) -> torch.Tensor:
    """What a product reads of an operand, by loops, as float64 ``[M, K]``; transformed where the copy is."""
    square = mode == "nvfp4_16x16"
    if not columnwise or square:
        return torch.from_numpy(nvfp4_by_hand.cast(x, square=square).values())
    lines = nvfp4_by_hand.hadamard(x.t()) if mode == "nvfp4_hadamard" else x.t()
    return torch.from_numpy(nvfp4_by_hand.cast(lines).values()).t()


def product(a: torch.Tensor, b: torch.Tensor, layout: str) -> torch.Tensor:
    return {"fprop": lambda: a @ b.t(), "dgrad": lambda: a @ b, "wgrad": lambda: a.t() @ b}[layout]()


def drawn(layout: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(shape, generator=generator).bfloat16() * 3 for shape in SHAPES[layout]]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layout", "mode_a", "mode_b"), PAIRS)
def test_a_product_is_that_of_the_values_along_the_sum(
    layout: str, mode_a: str, mode_b: str, out_dtype: torch.dtype
) -> None:
    a, b = drawn(layout)
    exact = product(
        values(a, mode_a, columnwise=layout == "wgrad"), values(b, mode_b, columnwise=layout != "fprop"), layout
    )
    found = ops.gemm(operand(a, mode_a), operand(b, mode_b), layout=layout, out_dtype=out_dtype)
    assert relative_error(found, exact) < GEMM.contract.bound[out_dtype]


@pytest.mark.parametrize("layout", SHAPES)
def test_a_plain_operand_a_bias_and_an_accumulated_result_go_along(layout: str) -> None:
    a, b = drawn(layout)
    exact = product(a.double(), values(b, "nvfp4", columnwise=layout != "fprop"), layout)
    out = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(exact.shape[1]) if layout == "fprop" else None
    expected = exact + out.double() + (0 if bias is None else bias.double())
    found = ops.gemm(a, operand(b, "nvfp4"), bias=bias, out=out, accumulate=True, layout=layout)
    assert found is out
    assert relative_error(found, expected) < GEMM.contract.bound[torch.float32]


def test_the_transform_cancels_in_wgrad() -> None:
    """Quantization aside: what differs from the product of the inputs is of the size of 4-bit rounding."""
    a, b = drawn("wgrad")
    exact = product(a.double(), b.double(), "wgrad")
    for mode in ("nvfp4", "nvfp4_hadamard"):
        found = ops.gemm(operand(a, mode), operand(b, mode), layout="wgrad")
        assert relative_error(found, exact) < 0.2


@pytest.mark.parametrize(
    ("layout", "modes", "copies"),
    [
        ("wgrad", ("nvfp4_hadamard", "nvfp4"), ({}, {})),
        ("wgrad", ("nvfp4", "nvfp4_hadamard"), ({}, {})),
        ("dgrad", ("nvfp4", "nvfp4_hadamard"), ({}, {})),
        ("fprop", ("nvfp4_hadamard", "nvfp4"), ({"rowwise": False}, {})),
    ],
)
def test_one_transformed_operand_alone_is_refused(layout: str, modes: tuple[str, str], copies: tuple) -> None:
    given = [operand(x, mode, **kept) for x, mode, kept in zip(drawn(layout), modes, copies, strict=True)]
    with pytest.raises(UnsupportedError, match=r"Hadamard-transformed along the sum.*with one that is not"):
        ops.gemm(*given, layout=layout)


def test_nvfp4_does_not_mix_with_other_families() -> None:
    a, b = drawn("fprop")
    other = ops.quantize(b, dtype=E4M3.dtype, mode="mxfp8")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="'mxfp8' and 'nvfp4'"):
        ops.gemm(operand(a, "nvfp4"), other)


def test_zeros_give_zeros() -> None:
    """Case B04."""
    a, b = drawn("fprop")
    assert not ops.gemm(operand(torch.zeros_like(a), "nvfp4"), operand(b, "nvfp4")).any()
