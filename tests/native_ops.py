"""The entries of a kernel library as functions of tensors, over the ctypes table; results are new, poisoned before.

A result lies ``offset`` elements off an aligned address; a workspace has exactly the size that the library asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from native_cases import DTYPE_CODES

if TYPE_CHECKING:
    from native_table import Library

E4M3 = torch.float8_e4m3fn
NORMS = {"layernorm": "LAYERNORM", "rmsnorm": "RMSNORM"}
_POISON = 0xA5


class Quantized(NamedTuple):
    """What an entry with a cast wrote; None where it was not asked to."""

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None
    scale_inv: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor


class Cast(NamedTuple):
    """How an entry shall cast: with ``scale`` given delayed scaling, without it current scaling."""

    dtype: torch.dtype = E4M3
    scale: float | None = None
    amax: float = 0.0
    rowwise: bool = True
    columnwise: bool = True
    order: str = "TRANSPOSED"
    epsilon: float = 0.0
    power_of_2: bool = False

    @property
    def mode(self) -> str:
        """The te_hal_mode."""
        return "MODE_TENSOR_CURRENT" if self.scale is None else "MODE_TENSOR"


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    """A tensor to be written, of a byte pattern that no kernel leaves there by chance."""
    size = torch.Size(shape).numel()
    room = torch.full(((size + offset) * dtype.itemsize,), _POISON, dtype=torch.uint8)
    return room.view(dtype)[offset:].view(shape)


def workspace(library: Library, op: str, rows: int, cols: int, *, kind=0, dtype=0, mode=0) -> tuple[object, int]:
    """Scratch memory of as many bytes as the library asks for, and their number."""
    choices = [library.codes[code] if isinstance(code, str) else code for code in (kind, dtype, mode)]
    size = library.call("workspace_bytes", op, *choices, rows, cols)
    assert size >= 0
    return poisoned(max(size, 1), dtype=torch.uint8), size


def norm_fwd(
    library: Library, norm: str, x, weight, bias=None, *, epsilon=1e-5, zero_centered=False, out_dtype=None, offset=0
):
    """(output, mean or None, rstd)."""
    rows, cols = x.shape
    output = poisoned(rows, cols, dtype=out_dtype or x.dtype, offset=offset)
    mean, rstd = (poisoned(rows) if bias is not None else None), poisoned(rows)
    library.norm_fwd(
        *(NORMS[norm], x, DTYPE_CODES[x.dtype], rows, cols, weight, DTYPE_CODES[weight.dtype]),
        *(bias, 0 if bias is None else DTYPE_CODES[bias.dtype], epsilon),
        *("FLAG_ZERO_CENTERED_GAMMA" if zero_centered else 0, output, DTYPE_CODES[output.dtype], mean, rstd, 0),
    )
    return output, mean, rstd


def norm_bwd(library: Library, norm: str, grad, x, mean, rstd, weight, *, zero_centered=False, offset=0):
    """(grad_input, grad_weight, grad_bias or None)."""
    rows, cols = x.shape
    grad_input = poisoned(rows, cols, dtype=x.dtype, offset=offset)
    grad_weight = poisoned(cols, dtype=weight.dtype)
    grad_bias = poisoned(cols, dtype=weight.dtype) if norm == "layernorm" else None
    scratch = workspace(library, "OP_NORM_BWD", rows, cols, kind=NORMS[norm], dtype=DTYPE_CODES[x.dtype])
    library.norm_bwd(
        *(NORMS[norm], grad, DTYPE_CODES[grad.dtype], x, DTYPE_CODES[x.dtype], rows, cols, mean, rstd),
        *(weight, DTYPE_CODES[weight.dtype], "FLAG_ZERO_CENTERED_GAMMA" if zero_centered else 0),
        *(grad_input, grad_weight, grad_bias, *scratch, 0),
    )
    return grad_input, grad_weight, grad_bias


def softmax_fwd(library: Library, x, *, scale=1.0, mask=None, causal="NONE", window=(-1, -1), out_dtype=None, offset=0):
    """Probabilities of scores [outer, inner, queries, keys]; a bool mask that broadcasts to them."""
    output = poisoned(*x.shape, dtype=out_dtype or x.dtype, offset=offset)
    strides = (0, 0, 0, 0) if mask is None else mask.expand(x.shape).stride()
    library.softmax_fwd(
        *(x, DTYPE_CODES[x.dtype], *x.shape, scale, mask, *strides, f"CAUSAL_{causal}", *window),
        *(output, DTYPE_CODES[output.dtype], 0),
    )
    return output


def softmax_bwd(library: Library, grad, output, *, scale=1.0, causal="NONE", window=(-1, -1), offset=0):
    """Gradient of scores [batches, queries, keys]."""
    grad_input = poisoned(*grad.shape, dtype=grad.dtype, offset=offset)
    library.softmax_bwd(
        *(grad, DTYPE_CODES[grad.dtype], output, DTYPE_CODES[output.dtype], *grad.shape, scale),
        *(f"CAUSAL_{causal}", *window, grad_input, 0),
    )
    return grad_input


def _activation_arguments(activation: str, parameters) -> tuple[float, float, float]:
    if activation == "clamped_swiglu":
        return parameters or (7.0, 1.702, 1.0)
    return (0.0, 0.0, 0.0)


def is_gated(activation: str) -> bool:
    """Whether its input has two halves."""
    return activation.endswith("glu")


def activation_fwd(library: Library, activation: str, x, *, parameters=None, out_dtype=None, offset=0):
    """The activation's output."""
    rows, cols = x.shape[0], x.shape[1] // (2 if is_gated(activation) else 1)
    output = poisoned(rows, cols, dtype=out_dtype or x.dtype, offset=offset)
    library.activation_fwd(
        *(activation.upper(), x, DTYPE_CODES[x.dtype], rows, cols, *_activation_arguments(activation, parameters)),
        *(output, DTYPE_CODES[output.dtype], 0),
    )
    return output


def activation_bwd(library: Library, activation: str, grad, x, *, parameters=None, out_dtype=None, offset=0):
    """The gradient of the activation's input."""
    grad_input = poisoned(*x.shape, dtype=out_dtype or x.dtype, offset=offset)
    library.activation_bwd(
        *(activation.upper(), grad, DTYPE_CODES[grad.dtype], x, DTYPE_CODES[x.dtype], *grad.shape),
        *(*_activation_arguments(activation, parameters), grad_input, DTYPE_CODES[grad_input.dtype], 0),
    )
    return grad_input


def bias_grad(library: Library, grad, *, out_dtype=None):
    """The sum over rows."""
    rows, cols = grad.shape
    sums = poisoned(cols, dtype=out_dtype or grad.dtype)
    scratch = workspace(library, "OP_BIAS_GRAD", rows, cols, dtype=DTYPE_CODES[grad.dtype])
    library.bias_grad(grad, DTYPE_CODES[grad.dtype], rows, cols, sums, DTYPE_CODES[sums.dtype], *scratch, 0)
    return sums


class _Target:
    """Where an entry with a cast of [rows, cols] writes, and its arguments for that."""

    def __init__(self, cast: Cast, rows: int, cols: int, offset: int) -> None:
        turned = (cols, rows) if cast.order == "TRANSPOSED" else (rows, cols)
        self.cast = cast
        self.rowwise = poisoned(rows, cols, dtype=torch.uint8, offset=offset) if cast.rowwise else None
        self.columnwise = poisoned(*turned, dtype=torch.uint8, offset=offset) if cast.columnwise else None
        self.scale_inv = poisoned(1)
        self.scale = poisoned(1) if cast.scale is None else torch.tensor([cast.scale])
        self.amax = poisoned(1) if cast.scale is None else torch.tensor([cast.amax])
        self.flags = 2 if cast.power_of_2 else 0

    def scaling(self) -> tuple[object, ...]:
        return self.cast.mode, self.scale, self.amax, self.cast.epsilon

    def copies(self) -> tuple[object, ...]:
        other_scale_inv = self.scale_inv if self.cast.columnwise else None
        order, dtype = f"ORDER_{self.cast.order}", DTYPE_CODES[self.cast.dtype]
        return self.rowwise, self.columnwise, order, self.scale_inv, other_scale_inv, dtype

    def result(self) -> Quantized:
        return Quantized(self.rowwise, self.columnwise, self.scale_inv, self.scale, self.amax)


def norm_quantize(
    library: Library,
    norm: str,
    x,
    weight,
    bias,
    cast: Cast,
    *,
    zero_centered=False,
    rounded=None,
    plain=False,
    offset=0,
):
    """(quantized, plain or None, mean or None, rstd)."""
    rows, cols = x.shape
    target, rounded = _Target(cast, rows, cols, offset), rounded or x.dtype
    mean, rstd = (poisoned(rows) if bias is not None else None), poisoned(rows)
    kept = poisoned(rows, cols, dtype=rounded, offset=offset) if plain else None
    scratch = workspace(library, "OP_NORM_QUANTIZE", rows, cols, kind=NORMS[norm], mode=cast.mode)
    library.norm_quantize(
        *(NORMS[norm], x, DTYPE_CODES[x.dtype], rows, cols, weight, DTYPE_CODES[weight.dtype], bias),
        *(0 if bias is None else DTYPE_CODES[bias.dtype], 1e-5, target.flags + (4 if zero_centered else 0), mean, rstd),
        *(kept, DTYPE_CODES[rounded], *target.scaling(), *target.copies(), *scratch, 0),
    )
    return target.result(), kept, mean, rstd


def activation_quantize(library: Library, activation: str, x, cast: Cast, *, rounded=None, offset=0) -> Quantized:
    """The cast of the activation's output."""
    rows, cols = x.shape[0], x.shape[1] // (2 if is_gated(activation) else 1)
    target = _Target(cast, rows, cols, offset)
    scratch = workspace(library, "OP_ACTIVATION_QUANTIZE", rows, cols, kind=activation.upper(), mode=cast.mode)
    library.activation_quantize(
        *(activation.upper(), x, DTYPE_CODES[x.dtype], rows, cols, *_activation_arguments(activation, None)),
        *(DTYPE_CODES[rounded or x.dtype], *target.scaling(), target.flags, *target.copies(), *scratch, 0),
    )
    return target.result()


def activation_bwd_quantize(
    library: Library, activation: str, grad, x, cast: Cast, *, rounded=None, bias_dtype=None, offset=0
):
    """(quantized gradient, its column sums or None)."""
    rows, cols = x.shape
    target = _Target(cast, rows, cols, offset)
    sums = None if bias_dtype is None else poisoned(cols, dtype=bias_dtype)
    op, kind = "OP_ACTIVATION_BWD_QUANTIZE", activation.upper()
    scratch = workspace(library, op, *grad.shape, kind=kind, mode=cast.mode)
    library.activation_bwd_quantize(
        *(kind, grad, DTYPE_CODES[grad.dtype], x, DTYPE_CODES[x.dtype], *grad.shape),
        *(*_activation_arguments(activation, None), DTYPE_CODES[rounded or x.dtype], sums),
        *(0 if sums is None else DTYPE_CODES[sums.dtype], *target.scaling(), target.flags, *target.copies()),
        *(*scratch, 0),
    )
    return target.result(), sums


def bias_grad_quantize(library: Library, grad, cast: Cast, *, bias_dtype=None, offset=0):
    """(quantized gradient, its column sums)."""
    rows, cols = grad.shape
    target, sums = _Target(cast, rows, cols, offset), poisoned(cols, dtype=bias_dtype or grad.dtype)
    scratch = workspace(library, "OP_BIAS_GRAD_QUANTIZE", rows, cols, mode=cast.mode)
    library.bias_grad_quantize(
        *(grad, DTYPE_CODES[grad.dtype], rows, cols, sums, DTYPE_CODES[sums.dtype], *target.scaling(), target.flags),
        *(*target.copies(), *scratch, 0),
    )
    return target.result(), sums
