"""Float8Tensor: a quantized storage as a ``torch.Tensor``, for users and for values that leave a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

import te_hal.ops
from te_hal.schema.errors import StateError
from te_hal.schema.formats import ColumnwiseOrder, DType
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from te_hal.quantization.quantizer import Quantizer

_aten = torch.ops.aten


class Float8Tensor(torch.Tensor):
    """A per-tensor quantized tensor with the nominal dtype, shape and device of what it stands for.

    Torch operations that a format defines keep it quantized: ``detach``, ``clone``, ``view``/``reshape``, ``.to``
    of another nominal dtype or device, and ``copy_`` into it (which quantizes). Other in-place operations
    dequantize, compute and quantize back. Everything else dequantizes its operands and returns a plain tensor.

    Args:
        storage: the data; shared, not copied.
        quantizer: used by in-place operations; None refuses them.
        requires_grad: as for any tensor.

    Attributes:
        quantized_storage: the storage that modules and ops work with.
    """

    quantized_storage: QuantizedStorage
    _quantizer: Quantizer | None

    def __new__(  # noqa: PYI034 - typing.Self needs Python 3.11
        cls,
        storage: QuantizedStorage,
        *,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
    ) -> Float8Tensor:
        """Wrap a storage; see the class."""
        made: Float8Tensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way
            cls, storage.shape, dtype=storage.dtype, device=storage.device, requires_grad=requires_grad
        )
        made.quantized_storage = storage
        made._quantizer = quantizer
        return made

    @property
    def _data(self) -> torch.Tensor | None:
        return self.quantized_storage.rowwise_data

    @property
    def _rowwise_data(self) -> torch.Tensor | None:
        return self.quantized_storage.rowwise_data

    @property
    def _transpose(self) -> torch.Tensor | None:
        return self.quantized_storage.columnwise_data

    @property
    def _columnwise_data(self) -> torch.Tensor | None:
        return self.quantized_storage.columnwise_data

    @property
    def _scale_inv(self) -> torch.Tensor | None:
        storage = self.quantized_storage
        return storage.columnwise_scale_inv if storage.rowwise_scale_inv is None else storage.rowwise_scale_inv

    @property
    def _fp8_dtype(self) -> DType:
        return DType.kFloat8E4M3 if self.quantized_storage.format.name == "E4M3" else DType.kFloat8E5M2

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain values, in ``dtype`` or the nominal dtype; gradients pass straight through."""
        return _Dequantize.apply(self, dtype or self.dtype)  # type: ignore[no-any-return,no-untyped-call]

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Float8Tensor:
        """Quantize ``tensor`` into this one, in place, with the quantizer this one was made by.

        Raises:
            StateError: this tensor has no quantizer.
        """
        return self._own_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)

    def _own_quantizer(self) -> Quantizer:
        if self._quantizer is None:
            raise StateError(
                "Float8Tensor: in-place operation",
                got="a tensor without a quantizer",
                accepted="one made by a quantizer",
                todo="quantize anew instead of writing in place",
            )
        return self._quantizer

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's stub hides the name
        storage = self.quantized_storage
        return f"Float8Tensor({storage.kind!r}, scale_inv={self._scale_inv}, data={self.dequantize()})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub leaves `cls, func` out
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the torch operation returns
        kwargs = dict(kwargs or {})
        kept = _KEPT.get(func)
        if kept is not None:
            result = kept(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable:  # type: ignore[attr-defined] # noqa: SLF001 - torch has no public reader
            return _in_place(func, args, kwargs)
        plain_args, plain_kwargs = pytree.tree_map_only(Float8Tensor, _plain, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


def _plain(tensor: Float8Tensor) -> torch.Tensor:
    return te_hal.ops.dequantize(tensor.quantized_storage)


def _in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Dequantize, run, and quantize what was written back into its Float8Tensor."""
    schema = func._schema  # type: ignore[attr-defined] # noqa: SLF001
    plain_of: dict[int, torch.Tensor] = {}

    def plain(tensor: Float8Tensor) -> torch.Tensor:
        return plain_of.setdefault(id(tensor), _plain(tensor))

    written = [
        value
        for argument, value in [
            *zip(schema.arguments, args, strict=False),
            *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
        ]
        if argument.is_write and isinstance(value, Float8Tensor)
    ]
    for tensor in written:
        tensor._own_quantizer()  # noqa: SLF001 - refuse before anything is computed
    plain_args, plain_kwargs = pytree.tree_map_only(Float8Tensor, plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for tensor in written:
        tensor.quantize_(plain_of[id(tensor)])
    originals = {id(plain_of[id(tensor)]): tensor for tensor in written}
    return pytree.tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)


def _rewrapped(tensor: Float8Tensor, storage: QuantizedStorage) -> Float8Tensor:
    return Float8Tensor(storage, quantizer=tensor._quantizer)  # noqa: SLF001


def _map_buffers(tensor: Float8Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> Float8Tensor:
    storage = tensor.quantized_storage
    buffers = tuple(None if t is None else function(t) for t in storage.tensors())
    return _rewrapped(tensor, storage.with_tensors(buffers))


def _detach(tensor: Float8Tensor) -> Float8Tensor:
    return _rewrapped(tensor, tensor.quantized_storage)


def _clone(tensor: Float8Tensor, *, memory_format: torch.memory_format | None = None) -> Any:  # noqa: ANN401
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return _map_buffers(tensor, torch.clone)


def _view(tensor: Float8Tensor, size: Sequence[int]) -> Any:  # noqa: ANN401
    """A view of the rowwise copy; the columnwise one goes along where the last dimension stays."""
    storage = tensor.quantized_storage
    row, row_scale, col, col_scale = storage.tensors()
    if row is None:
        return NotImplemented
    viewed = row.view(size)
    same_last = bool(storage.shape) and bool(viewed.shape) and viewed.shape[-1] == storage.shape[-1]
    if col is not None and same_last:
        transposed = storage.columnwise_order == ColumnwiseOrder.TRANSPOSED
        col = col.view(viewed.shape[-1:] + viewed.shape[:-1] if transposed else viewed.shape)
    else:
        col, col_scale = None, None
    made = QuantizedStorage(
        format=storage.format,
        mode=storage.mode,
        shape=tuple(viewed.shape),
        dtype=storage.dtype,
        rowwise_data=viewed,
        rowwise_scale_inv=row_scale,
        columnwise_data=col,
        columnwise_scale_inv=col_scale,
        columnwise_order=storage.columnwise_order,
    )
    return _rewrapped(tensor, made)


def _to_copy(tensor: Float8Tensor, **kwargs: Any) -> Any:  # noqa: ANN401
    """Another nominal dtype or device; anything else a plain tensor would get (layout, memory format) is not kept."""
    dtype = kwargs.pop("dtype", None)
    device = kwargs.pop("device", None)
    non_blocking = kwargs.pop("non_blocking", False)
    kwargs.pop("copy", None)
    if any(value not in (None, torch.preserve_format, torch.strided, False) for value in kwargs.values()):
        return NotImplemented
    if dtype is not None and dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return NotImplemented
    moved = _map_buffers(tensor, lambda t: t.to(device=device, non_blocking=non_blocking, copy=True))
    storage = moved.quantized_storage
    return _rewrapped(tensor, storage.with_tensors(storage.tensors(), dtype))


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:  # noqa: ANN401
    if not isinstance(destination, Float8Tensor):
        return destination.copy_(_plain(source), non_blocking)  # type: ignore[arg-type]
    if isinstance(source, Float8Tensor) and source.quantized_storage.kind is destination.quantized_storage.kind:
        pairs = zip(destination.quantized_storage.tensors(), source.quantized_storage.tensors(), strict=True)
        for into, origin in pairs:
            if into is not None and origin is not None:
                into.copy_(origin, non_blocking)
        return destination
    plain = _plain(source) if isinstance(source, Float8Tensor) else source
    return destination.quantize_(plain.to(destination.device).expand(destination.shape))


#: Operations that keep their operand quantized; each may answer NotImplemented for what it cannot keep.
_KEPT: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,  # noqa: SLF001 - the operator's name
    _aten._to_copy.default: _to_copy,  # noqa: SLF001
    _aten.copy_.default: _copy,
}


class _Dequantize(torch.autograd.Function):
    """Back to plain values; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, tensor: Float8Tensor, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401, ARG004
        return te_hal.ops.dequantize(tensor.quantized_storage, out_dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401, ARG004
        return grad, None


class _Quantize(torch.autograd.Function):
    """Quantize for a user; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype | None) -> Float8Tensor:  # noqa: ANN401
        ctx.dtype = tensor.dtype
        storage = quantizer._nominal(quantizer._with_usages(tensor.detach()), dtype)  # noqa: SLF001
        return Float8Tensor(storage, quantizer=quantizer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        plain = grad.dequantize() if isinstance(grad, Float8Tensor) else grad
        return plain.to(ctx.dtype), None, None


def quantize_straight_through(tensor: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype | None) -> Float8Tensor:
    """Quantize with a gradient that ignores the rounding."""
    return _Quantize.apply(tensor, quantizer, dtype)  # type: ignore[no-any-return,no-untyped-call]
