"""What cpu_reference says it can do."""

from __future__ import annotations

import inspect

import pytest
import torch

from te_hal.backends.cpu_reference import create_backend
from te_hal.dispatch import GemmCopies
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.formats import E4M3, ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import Call, Code, Support

CPU = torch.device("cpu")


def storage_kind(mode: ScalingMode) -> StorageKind:
    return StorageKind.of(E4M3, mode, rowwise=True, columnwise=False, order=ColumnwiseOrder.TRANSPOSED)


def test_every_required_op_has_a_kernel_of_the_schemas_signature() -> None:
    kernels = create_backend().kernels
    assert set(kernels) == {name for name, schema in SCHEMAS.items() if not schema.optional}
    for name, kernel in kernels.items():
        names = [argument for argument, _, _ in SCHEMAS[name].signature]
        assert list(inspect.signature(kernel).parameters) == names


def test_it_serves_every_device_and_claims_the_cpu() -> None:
    backend = create_backend()
    assert backend.takes("cpu")
    assert backend.takes("musa")
    assert backend.default_for == {"cpu"}


def test_its_gemm_reads_the_rowwise_copies() -> None:
    backend = create_backend()
    for layout in ("fprop", "dgrad", "wgrad"):
        assert backend.gemm_copies(layout, E4M3, ScalingMode.TENSOR) == GemmCopies("rowwise", "rowwise")


def test_its_gemm_reads_the_blocks_that_lie_along_the_sum() -> None:
    answers = create_backend().gemm_copies
    for mode in (ScalingMode.BLOCK_1X128, ScalingMode.MXFP8):
        assert answers("fprop", E4M3, mode) == GemmCopies("rowwise", "rowwise")
        assert answers("dgrad", E4M3, mode) == GemmCopies("rowwise", "columnwise")
        assert answers("wgrad", E4M3, mode) == GemmCopies("columnwise", "columnwise")
    assert answers("wgrad", E4M3, ScalingMode.BLOCK_128X128) == GemmCopies("rowwise", "rowwise")


def test_hadamards_transform_of_anything_but_bf16_is_refused_by_both_dtypes() -> None:
    def answer(dtype: torch.dtype, *, columnwise: bool) -> Support:
        flags = {"mode": ScalingMode.NVFP4_HADAMARD, "columnwise": columnwise}
        return create_backend().supports(Call("quantize", CPU, {"input": dtype}, flags))

    assert answer(torch.bfloat16, columnwise=True)
    assert answer(torch.float32, columnwise=False)
    refused = answer(torch.float32, columnwise=True)
    assert refused.code is Code.DTYPE
    assert "takes torch.bfloat16, not torch.float32" in refused.sentence


@pytest.mark.parametrize("mode", list(ScalingMode), ids=lambda mode: mode.value)
def test_every_mode_is_supported(mode: ScalingMode) -> None:
    supports = create_backend().supports
    assert supports(Call("quantize", CPU, {"input": torch.bfloat16}, {"mode": mode}))
    assert supports(Call("quantize", CPU, {"input": torch.bfloat16}, {"mode": mode.value}))
    assert supports(Call("gemm", CPU, {"a": storage_kind(mode), "b": torch.float32}))
    assert supports(Call("gemm", CPU, {"a": storage_kind(mode), "b": storage_kind(mode)}))


def test_a_product_of_two_families_is_refused_by_both_names() -> None:
    kinds = {"a": storage_kind(ScalingMode.BLOCK_1X128), "b": storage_kind(ScalingMode.MXFP8)}
    answer = create_backend().supports(Call("gemm", CPU, kinds))
    assert answer.code is Code.MODE
    assert "'block_1x128' and 'mxfp8'" in answer.sentence
