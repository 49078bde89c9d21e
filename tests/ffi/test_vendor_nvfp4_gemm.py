"""Products of NVFP4 and MTFP8 operands by torch.mm, from what the library decodes, beside cpu_reference.

torch.mm of the CPU stands in for the vendor's; the library is the emulator's.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import native_backends
import pytest
import torch
from closeness import relative_error

from te_hal.backends.cpu_reference import gemm as reference
from te_hal.backends.cpu_reference.cast import quantize
from te_hal.backends.cuda import gemm as cuda
from te_hal.backends.musa import gemm as musa
from te_hal.ffi.marshalling.gemm_choice import VendorGemm, Way
from te_hal.ffi.native import native_of
from te_hal.schema.formats import E2M1, E4M3, FLOATS, ColumnwiseOrder, ScalingMode
from te_hal.schema.gemm import GEMM, LAYOUTS
from te_hal.schema.storage import StorageKind

if TYPE_CHECKING:
    from te_hal.ffi.native import Native
    from te_hal.schema.formats import ElementFormat

BOUND = GEMM.contract.bound
PLAIN, SQUARE, HADAMARD = ScalingMode.NVFP4, ScalingMode.NVFP4_16X16, ScalingMode.NVFP4_HADAMARD
MTFP8 = ScalingMode.MTFP8_1X128, ScalingMode.MTFP8_128X128
M, N, K = 64, 48, 80
SHAPES = {"fprop": ((M, K), (N, K)), "dgrad": ((M, N), (N, K)), "wgrad": ((M, N), (M, K))}
#: Layouts with the modes that go together in them.
PRODUCTS = [
    *((layout, pair, E2M1) for layout in LAYOUTS for pair in itertools.product((PLAIN, SQUARE), repeat=2)),
    ("fprop", (HADAMARD, SQUARE), E2M1),
    ("dgrad", (HADAMARD, SQUARE), E2M1),
    ("wgrad", (HADAMARD, HADAMARD), E2M1),
    *((layout, pair, E4M3) for layout in LAYOUTS for pair in itertools.product(MTFP8, repeat=2)),
]


@pytest.fixture(scope="module")
def native() -> Native:
    native_backends.emulator()
    found = native_of("musa_emulator")
    assert found is not None
    return found


@pytest.mark.parametrize(("layout", "modes", "target"), PRODUCTS, ids=str)
def test_decoded_operands_are_multiplied_within_the_bound(layout, modes, target, native: Native) -> None:
    order = ColumnwiseOrder.TRANSPOSED if target is E2M1 else ColumnwiseOrder.SAME
    drawn = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(SHAPES[layout])]
    given = [
        quantize(x.bfloat16() * 3, dtype=target.dtype, mode=mode, columnwise=True, columnwise_order=order)
        for x, mode in zip(drawn, modes, strict=True)
    ]
    exact = reference.gemm(*given, layout=layout, out_dtype=torch.float32).double()
    way = Way.DECODED if target is E2M1 else Way.DEQUANTIZED
    vendor = VendorGemm(choose=lambda *_: way, fp32_product=False, needs_rows=True)
    for dtype in FLOATS:
        result = vendor.gemm(native, *given, layout=layout, out_dtype=dtype)
        assert relative_error(result, exact) <= 2 * BOUND[dtype]


def kind(mode: ScalingMode, target: ElementFormat) -> StorageKind:
    order = ColumnwiseOrder.TRANSPOSED if target is E2M1 else ColumnwiseOrder.SAME
    return StorageKind.of(target, mode, rowwise=True, columnwise=True, order=order)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("mode", "target", "way"),
    [(PLAIN, E2M1, Way.DECODED), (HADAMARD, E2M1, Way.DECODED), (MTFP8[0], E4M3, Way.DEQUANTIZED)],
)
def test_no_device_multiplies_them_as_they_are(mode, target, way, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(musa, "architecture", lambda _: 31)
    operand = kind(mode, target)
    for choose in (cuda.choose.__wrapped__, musa.choose.__wrapped__):
        assert choose(torch.device("cpu"), operand, operand, dtype) is way
        assert choose(torch.device("cpu"), operand, torch.bfloat16, dtype) is Way.PORTABLE
