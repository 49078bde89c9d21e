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
from te_hal.schema.support import Call, Code

CPU = torch.device("cpu")
LATER = [mode for mode in ScalingMode if mode is not ScalingMode.TENSOR]


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


@pytest.mark.parametrize("mode", LATER, ids=lambda mode: mode.value)
def test_modes_that_are_not_built_are_refused_by_name(mode: ScalingMode) -> None:
    for call in (
        Call("quantize", CPU, {}, {"mode": mode.value}),
        Call("dequantize", CPU, {"input": storage_kind(mode)}),
    ):
        answer = create_backend().supports(call)
        assert answer.code is Code.MODE
        assert mode.value in answer.sentence
        assert "not built yet" in answer.sentence


def test_per_tensor_scaling_is_supported() -> None:
    supports = create_backend().supports
    assert supports(Call("quantize", CPU, {"input": torch.bfloat16}, {"mode": ScalingMode.TENSOR}))
    assert supports(Call("gemm", CPU, {"a": storage_kind(ScalingMode.TENSOR), "b": torch.float32}))
