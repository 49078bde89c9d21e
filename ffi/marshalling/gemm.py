"""gemm and bias_grad by the library's portable kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, check_writable, contiguous, scratch
from te_hal.ffi.marshalling.block_cast import given_blocks
from te_hal.ffi.marshalling.cast import copy_to_read
from te_hal.ffi.marshalling.nvfp4_cast import given_codes
from te_hal.schema.backend import ALONG_THE_SUM
from te_hal.schema.formats import ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    import torch

    from te_hal.ffi.native import Native

    Operand = torch.Tensor | QuantizedStorage

_OP_GEMM = codes.OPS["gemm"]
_OP_BIAS_GRAD = codes.OPS["bias_grad"]


class _Given(NamedTuple):
    """An operand as the entry takes it; ``data`` and ``scale_inv`` stay alive until the call."""

    data: torch.Tensor
    dtype: int
    copy: int
    mode: int
    scale_inv: torch.Tensor | None
    strides: tuple[int, int] = (0, 0)

    def arguments(self) -> tuple[int, ...]:
        return address(self.data), self.dtype, self.copy, self.mode, address(self.scale_inv), *self.strides


def gemm(
    native: Native,
    a: Operand,
    b: Operand,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    layout: str = "fprop",
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """te_hal.ops.gemm by the tiled kernel, for every pairing of operands and any sizes."""
    m, n, k = sizes(a.shape, b.shape, layout)
    shape = {"fprop": (m, n), "dgrad": (m, k), "wgrad": (n, k)}[layout]
    result = _target(native, out, shape, out_dtype or a.dtype, a.device, accumulate=accumulate)
    bias = None if bias is None else contiguous(bias)
    reads = ALONG_THE_SUM[layout]
    given_a, given_b = _given(native, a, reads.a), _given(native, b, reads.b)
    kind = codes.LAYOUTS[layout]
    workspace = native.workspace(a.device, _OP_GEMM, rows=shape[0], cols=shape[1], kind=kind)
    status = native.lib.api_gemm(
        native.library.api,
        kind,
        m,
        n,
        k,
        *given_a.arguments(),
        *given_b.arguments(),
        address(bias),
        codes.NO_DTYPE if bias is None else codes.DTYPES[bias.dtype],
        address(result),
        codes.DTYPES[result.dtype],
        codes.FLAG_ACCUMULATE if accumulate else 0,
        *scratch(workspace),
        native.stream(a.device),
    )
    if status:
        native.check(status, "gemm")
    if out is None:
        return result
    return out if result is out else out.copy_(result)


def sizes(a: tuple[int, ...], b: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    """M, N and K of the schema, from the operands' shapes."""
    if layout == "fprop":
        return a[0], b[0], a[1]
    return a[0], a[1], b[1]


def _target(
    native: Native,
    out: torch.Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    accumulate: bool,
) -> torch.Tensor:
    """What the kernel writes to: ``out`` where it is contiguous, else a new tensor with what it may add to."""
    if out is None:
        return native.empty(shape, dtype, device)
    check_writable(native, "gemm", "out", out)
    if accumulate or out.is_contiguous():
        return contiguous(out)
    return native.empty(shape, out.dtype, device)


def _given(native: Native, operand: Operand, along_the_sum: str) -> _Given:
    if isinstance(operand, QuantizedStorage):
        if operand.mode is not ScalingMode.TENSOR:
            return _given_blocks(operand, along_the_sum)
        data, copy, scale_inv = copy_to_read(native, operand)
        return _Given(data, codes.DTYPES[operand.format.dtype], copy, codes.MODES[operand.mode], scale_inv)
    data = contiguous(operand)
    return _Given(data, codes.DTYPES[data.dtype], codes.COPY_ROWWISE, codes.MODE_NONE, None)


def _given_blocks(operand: QuantizedStorage, along_the_sum: str) -> _Given:
    """Of two copies the one whose blocks lie along the sum (B5)."""
    rowwise = along_the_sum == "rowwise"
    dtype, mode = codes.DTYPES[operand.format.dtype], codes.MODES[operand.mode]
    if operand.mode in NVFP4_MODES:
        data, copy, scale_inv = given_codes(operand, rowwise=rowwise)
        return _Given(data, dtype, copy, mode, scale_inv)
    given = given_blocks(operand, rowwise=rowwise)
    return _Given(given.data, dtype, given.copy, mode, given.grid, given.strides)


def bias_grad(native: Native, grad_output: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """te_hal.ops.bias_grad."""
    grad = contiguous(grad_output)
    rows, cols = grad.shape
    result = native.empty((cols,), out_dtype or grad.dtype, grad.device)
    dtype = codes.DTYPES[grad.dtype]
    workspace = native.workspace(grad.device, _OP_BIAS_GRAD, rows=rows, cols=cols, input_dtype=dtype)
    status = native.lib.api_bias_grad(
        native.library.api,
        address(grad),
        dtype,
        rows,
        cols,
        address(result),
        codes.DTYPES[result.dtype],
        *scratch(workspace),
        native.stream(grad.device),
    )
    if status:
        native.check(status, "bias_grad")
    return result
