"""What torch's operations do with a QuantizedTensor; the rules stand in that class's docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils import _pytree as pytree

from te_hal.quantization.copies import with_copies
from te_hal.quantization.hybrid_storage import HybridStorage, values_of
from te_hal.quantization.identity_storage import IdentityStorage
from te_hal.quantization.split_storage import split_storage
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS, ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_hal.quantization.quantized_tensor import QuantizedTensor

_aten = torch.ops.aten


def run(kind: type[QuantizedTensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever the torch operation returns
    """Run a torch operation that has QuantizedTensors among its arguments.

    Args:
        kind: the class QuantizedTensor.
        func: the operation.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        A QuantizedTensor or a plain tensor, by operation.
    """
    if torch.is_inference_mode_enabled():
        return _in_inference_mode(kind, func, args, kwargs)
    return _run(kind, func, args, kwargs)


def _run(kind: type[QuantizedTensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    kept = _KEPT.get(func)
    if kept is not None:
        result = kept(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func._schema.is_mutable:  # type: ignore[attr-defined] # noqa: SLF001 - torch has no public reader
        return _in_place(kind, func, args, kwargs)
    plain_args, plain_kwargs = pytree.tree_map_only(kind, _plain, (args, kwargs))
    return func(*plain_args, **plain_kwargs)


def _in_inference_mode(
    kind: type[QuantizedTensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:  # noqa: ANN401
    """Run it as outside: torch hands over whole functions there, and wants views to be no inference tensors."""
    if func not in _KEPT:
        result = func.decompose(*args, **kwargs)  # type: ignore[attr-defined] # of every operator of torch
        if result is not NotImplemented:
            return result
    of_inference = any(isinstance(t, kind) and t.is_inference() for t in pytree.tree_leaves((args, kwargs)))
    if of_inference or not func.is_view:  # type: ignore[attr-defined] # of every operator of torch
        return _run(kind, func, args, kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return _run(kind, func, args, kwargs)


def _plain(tensor: QuantizedTensor) -> torch.Tensor:
    return values_of(tensor.quantized_storage)


def _in_place(
    kind: type[QuantizedTensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:  # noqa: ANN401
    """Dequantize, run, and quantize what was written back into its QuantizedTensor."""
    schema = func._schema  # type: ignore[attr-defined] # noqa: SLF001
    plain_of: dict[int, torch.Tensor] = {}

    def plain(tensor: QuantizedTensor) -> torch.Tensor:
        return plain_of.setdefault(id(tensor), _plain(tensor))

    given = [*zip(schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
    # A list of tensors (torch._foreach_add_ and the like) is written to as a whole.
    values = pytree.tree_leaves([value for argument, value in given if argument.is_write])
    written = [value for value in values if isinstance(value, kind)]
    for tensor in written:
        tensor._own_quantizer()  # noqa: SLF001 - refuse before anything is computed
    plain_args, plain_kwargs = pytree.tree_map_only(kind, plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for tensor in written:
        tensor.quantize_(plain_of[id(tensor)])
    originals = {id(plain_of[id(tensor)]): tensor for tensor in written}
    return pytree.tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)


def _is_quantized(tensor: torch.Tensor) -> TypeGuard[QuantizedTensor]:
    return hasattr(tensor, "quantized_storage")


def _rewrapped(tensor: QuantizedTensor, storage: QuantizedStorage) -> QuantizedTensor:
    whole = storage.kind is tensor.quantized_storage.kind
    # Writing to a view that leaves a copy out would leave the copies of what it views at odds.
    return type(tensor)(storage, quantizer=tensor._quantizer if whole else None)  # noqa: SLF001


def _map_buffers(tensor: QuantizedTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
    storage = tensor.quantized_storage
    buffers = tuple(None if t is None else function(t) for t in storage.tensors())
    return _rewrapped(tensor, storage.with_tensors(buffers))


def _detach(tensor: QuantizedTensor) -> QuantizedTensor:
    return _rewrapped(tensor, tensor.quantized_storage)


def _clone(tensor: QuantizedTensor, *, memory_format: torch.memory_format | None = None) -> Any:  # noqa: ANN401
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return _map_buffers(tensor, torch.clone)


def _view(tensor: QuantizedTensor, size: Sequence[int]) -> Any:  # noqa: ANN401
    """A view of the rowwise copy; a transposed one goes along where the last dimension stays."""
    storage = tensor.quantized_storage
    if storage.mode is not ScalingMode.TENSOR:
        return _view_of_blocks(tensor, size)
    if storage.rowwise_data is None:
        return NotImplemented
    viewed = storage.rowwise_data.view(size)  # errors of size and stride are torch's own
    return _rewrapped(tensor, storage.view(tuple(viewed.shape)))


def _view_of_blocks(tensor: QuantizedTensor, size: Sequence[int]) -> Any:  # noqa: ANN401
    """A view of both copies where the last dimension stays, as scales belong to rows and columns; else a plain copy."""
    try:
        return _rewrapped(tensor, tensor.quantized_storage.view(tuple(size)))
    except ArgumentError:
        return NotImplemented


def _split(tensor: QuantizedTensor, split_size: int, dim: int = 0) -> Any:  # noqa: ANN401
    """Parts of equal size, the last one shorter."""
    total = tensor.shape[dim] if tensor.dim() else 0
    if split_size <= 0 or not total:
        return NotImplemented  # torch's own errors
    sizes = [min(split_size, total - start) for start in range(0, total, split_size)]
    return _split_with_sizes(tensor, sizes, dim)


def _split_with_sizes(tensor: QuantizedTensor, split_sizes: Sequence[int], dim: int = 0) -> Any:  # noqa: ANN401
    """Parts along the first dimension that share codes; plain ones along another, or where a part cuts blocks."""
    sizes = list(split_sizes)
    storage: Any = tensor.quantized_storage
    if not tensor.dim() or sum(sizes) != tensor.shape[dim] or min(sizes, default=0) < 0:
        return NotImplemented
    if dim % tensor.dim():
        return _split_columns(tensor, sizes, dim)
    if isinstance(storage, HybridStorage):
        return NotImplemented
    if isinstance(storage, IdentityStorage):
        held: list[Any] = [IdentityStorage(part) for part in torch.split(storage.data, sizes)]
        return tuple(type(tensor)(part, quantizer=tensor._quantizer) for part in held)  # noqa: SLF001
    parts = split_storage(storage, sizes)
    if parts is None:
        return NotImplemented
    # A part's scales are its own, or shared with its neighbours: writing to it would leave the whole at odds.
    return tuple(type(tensor)(part) for part in parts)


def _split_columns(tensor: QuantizedTensor, sizes: list[int], dim: int) -> Any:  # noqa: ANN401
    """Parts along another dimension, of tensors with one scale: copies of the rowwise codes."""
    storage: Any = tensor.quantized_storage
    one_scale = storage.mode is ScalingMode.TENSOR and not isinstance(storage, (HybridStorage, IdentityStorage))
    if not one_scale or not storage.kind.rowwise:
        return NotImplemented
    rowwise = storage.keep(rowwise=True, columnwise=False)
    parts = [part.contiguous() for part in storage.rowwise_data.split(sizes, dim)]
    held = (
        QuantizedStorage.of_kind(
            rowwise.kind,
            tuple(part.shape),
            storage.dtype,
            storage.device,
            (part, rowwise.rowwise_scale_inv, None, None),
        )
        for part in parts
    )
    return tuple(type(tensor)(part) for part in held)


def _to_copy(tensor: QuantizedTensor, **kwargs: Any) -> Any:  # noqa: ANN401
    """Another nominal dtype or device; anything else a plain tensor would get (layout, memory format) is not kept."""
    dtype = kwargs.pop("dtype", None)
    device = kwargs.pop("device", None)
    non_blocking = kwargs.pop("non_blocking", False)
    kwargs.pop("copy", None)
    if any(value not in (None, torch.preserve_format, torch.strided, False) for value in kwargs.values()):
        return NotImplemented
    if dtype is not None and dtype not in FLOATS:
        return NotImplemented
    moved = _map_buffers(tensor, lambda t: t.to(device=device, non_blocking=non_blocking, copy=True))
    storage = moved.quantized_storage
    return _rewrapped(tensor, storage.with_tensors(storage.tensors(), dtype))


def _empty_like(
    tensor: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """A tensor of the same kind whose codes and scales have no defined values, as ``Module.to_empty`` asks for."""
    if dtype not in (None, *FLOATS) or any(
        value not in (None, torch.preserve_format, torch.contiguous_format, torch.strided, False)
        for value in kwargs.values()
    ):
        return NotImplemented
    made = _map_buffers(tensor, lambda buffer: torch.empty_like(buffer, device=device))
    storage = made.quantized_storage
    return _rewrapped(tensor, storage.with_tensors(storage.tensors(), dtype))


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:  # noqa: ANN401
    """Bytes between two of one shape and format; else quantize, or dequantize into a plain destination."""
    if not _is_quantized(destination):
        return destination.copy_(_plain(source), non_blocking)  # type: ignore[arg-type] # then the source is
    if _is_quantized(source):
        into = destination.quantized_storage
        origin = _with_copies_of(into, source.quantized_storage)
        if into.kind is origin.kind and into.shape == origin.shape:
            for target, buffer in zip(into.tensors(), origin.tensors(), strict=True):
                if target is not None and buffer is not None:
                    target.copy_(buffer, non_blocking)
            return destination
        source = _plain(source)
    dtype = source.dtype if source.dtype in FLOATS else destination.dtype
    return destination.quantize_(source.to(destination.device, dtype).expand(destination.shape))


def _with_copies_of(into: QuantizedStorage, origin: QuantizedStorage) -> QuantizedStorage:
    """The source with the destination's copies, where they follow from those that it has without rounding."""
    same = into.format is origin.format and into.mode is origin.mode is ScalingMode.TENSOR
    if not same or into.kind is origin.kind:
        return origin
    wanted = into.kind
    made = with_copies(origin, rowwise=wanted.rowwise, columnwise=wanted.columnwise, order=wanted.order)
    return made.keep(rowwise=wanted.rowwise, columnwise=wanted.columnwise)


#: Operations that keep their operand quantized; each may answer NotImplemented for what it cannot keep.
_KEPT: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,  # noqa: SLF001 - the operator's name
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.empty_like.default: _empty_like,
    _aten._to_copy.default: _to_copy,  # noqa: SLF001
    _aten.copy_.default: _copy,
}


def dequantize(tensor: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """The plain values in ``dtype``; gradients pass straight through."""
    return _Dequantize.apply(tensor, dtype)  # type: ignore[no-any-return,no-untyped-call]


class _Dequantize(torch.autograd.Function):
    """Back to plain values; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401, ARG004
        return values_of(tensor.quantized_storage, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401, ARG004
        return grad, None
