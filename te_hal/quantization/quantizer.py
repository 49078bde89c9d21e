"""Quantizer: turns tensors of one role into quantized ones. Subclasses know where the scale comes from."""

from __future__ import annotations

import abc
import copy
import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch

import te_hal.ops
from te_hal.quantization.quantized_tensor import QuantizedTensor, wrap
from te_hal.quantization.quantizer_arguments import check_nominal, check_plain, check_usage, noop_number
from te_hal.quantization.quantizer_interface import QuantizerInterface
from te_hal.quantization.straight_through import quantize_straight_through
from te_hal.quantization.te_part_storages import named_storage
from te_hal.schema.block_scales import fill_with_ones, order_of
from te_hal.schema.errors import ArgumentError, ArgumentTypeError
from te_hal.schema.formats import ColumnwiseOrder, DType, ElementFormat, ScalingMode, element_format
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from te_hal.quantization.observer import QuantizeObserver


class CastKernels(Protocol):
    """The ops that a quantizer calls: ``te_hal.ops`` itself, or the kernels that a module's plan has bound."""

    def quantize(self, *args: Any, **kwargs: Any) -> QuantizedStorage:  # noqa: ANN401 - the schema is the signature
        """See te_hal.ops.quantize."""
        ...

    def quantize_current(self, *args: Any, **kwargs: Any) -> QuantizedStorage:  # noqa: ANN401
        """See te_hal.ops.quantize_current."""
        ...


#: The ops as CastKernels: checked, and dispatched at every call.
OPS: Any = te_hal.ops


class Quantizer(QuantizerInterface, abc.ABC):
    """Quantizes tensors of one role to an 8-bit format.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or a ``te.DType``.
        rowwise: make the copy that fprop reads.
        columnwise: make the copy that transposed products read.

    Attributes:
        rowwise_usage, columnwise_usage: which copies :meth:`quantize` makes.
        columnwise_order: memory order of columnwise copies; modules set what their backend's gemm reads.
        internal: results are storages (te.Float8TensorStorage and its like), not tensors, and carry no gradient.
        format: the element format.
        observer: is told of everything that is quantized (te_hal.quantization.observer), or None.
    """

    mode: ScalingMode = ScalingMode.TENSOR

    #: Whether operands become codes; else :meth:`operand` gives a plain tensor.
    quantizes = True
    observer: QuantizeObserver | None = None

    def __init__(self, fp8_dtype: torch.dtype | DType | ElementFormat, *, rowwise: bool, columnwise: bool) -> None:
        self.format: ElementFormat = element_format(fp8_dtype, type(self).__name__)
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED
        self.internal = False

    @property
    def dtype(self) -> DType:
        """The element format as Transformer Engine's code."""
        return self.format.code

    @abc.abstractmethod
    def quantize_storage(
        self,
        tensor: torch.Tensor,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        out: QuantizedStorage | None = None,
        kernels: CastKernels = OPS,
    ) -> QuantizedStorage:
        """Quantize without autograd.

        Args:
            tensor: any shape; fp32, fp16 or bf16.
            rowwise: make the rowwise copy.
            columnwise: make the columnwise copy.
            out: storage to refill in place, with just these copies.
            kernels: who computes.

        Returns:
            A storage with the copies asked for, nominal dtype that of ``tensor``; ``out`` itself where given.

        Raises:
            ArgumentError, ArgumentTypeError: as te_hal.ops.quantize, where ``kernels`` check (a plan's do not).
            UnsupportedError: the backend in force, and every fallback the policy lists, lacks the cast.
        """

    def operand(
        self, tensor: torch.Tensor, *, rowwise: bool, columnwise: bool, kernels: CastKernels = OPS
    ) -> QuantizedStorage | torch.Tensor:
        """What a module's products take in place of ``tensor``: its codes, by :meth:`quantize_storage`."""
        return self.quantize_storage(tensor, rowwise=rowwise, columnwise=columnwise, kernels=kernels)

    def tell_observer(self, storage: QuantizedStorage, tensor: torch.Tensor | None = None) -> None:
        """Tell the observer, if there is one, of codes that were made now.

        :meth:`quantize_storage` does so itself; whoever runs an op with :meth:`fused_arguments` calls this after it.

        Args:
            storage: the codes.
            tensor: what was quantized; None where no plain tensor of it exists.
        """
        if self.observer is not None:
            self.observer(self, tensor, storage)

    @abc.abstractmethod
    def fused_arguments(self, *, rowwise: bool, columnwise: bool) -> dict[str, Any]:
        """What an op that computes and casts takes for the cast by this quantizer: te_hal.ops.layernorm_quantize, ...

        Args:
            rowwise: make the rowwise copy.
            columnwise: make the columnwise copy.

        Returns:
            ``scale`` and ``amax``, or what shapes the result's own scale; and format, mode and copies.
        """

    @abc.abstractmethod
    def calibrate(self, tensor: torch.Tensor) -> None:
        """Record what quantizing ``tensor`` would record, without quantizing."""

    def quantize(
        self, tensor: torch.Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor | QuantizedStorage:
        """Quantize; gradients pass straight through to ``tensor``.

        Args:
            tensor: any shape; fp32, fp16 or bf16.
            out: quantized tensor to refill in place; it keeps its nominal dtype, and no gradient is recorded.
            dtype: nominal dtype of the result; None: that of ``tensor``.

        Returns:
            A QuantizedTensor with the copies of :meth:`get_usages`; a bare storage when ``internal``.

        Raises:
            ArgumentTypeError: not a plain tensor.
            ArgumentError: another dtype; neither usage is set.
        """
        check_plain(f"{type(self).__name__}: tensor", tensor)
        check_nominal(type(self).__name__, dtype)
        if out is not None:
            return self.update_quantized(tensor, out)
        self._check_usages()
        with torch.no_grad():
            storage = self.quantize_storage(
                tensor.detach(), rowwise=self.rowwise_usage, columnwise=self.columnwise_usage
            )
        if dtype not in (None, storage.dtype):
            storage = storage.with_tensors(storage.tensors(), dtype)
        if self.internal:
            named: QuantizedStorage = named_storage(storage, self)
            return named
        return quantize_straight_through(tensor, storage, self)

    __call__ = quantize

    def _check_usages(self) -> None:
        if not (self.rowwise_usage or self.columnwise_usage):
            raise ArgumentError(
                type(self).__name__,
                got="neither rowwise nor columnwise usage",
                accepted="at least one of them",
                todo="call set_usage(rowwise=True)",
            )

    def _order_of(self, out: QuantizedStorage | None) -> ColumnwiseOrder:
        """A storage that is refilled keeps its order, whatever this quantizer makes now."""
        return self.columnwise_order if out is None else out.columnwise_order

    def update_quantized(
        self, src: torch.Tensor, dst: QuantizedTensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Quantize ``src`` into ``dst`` in place and return it.

        Args:
            src: plain tensor of ``dst``'s shape.
            dst: its copies are refilled, whatever this quantizer's usages are.
            noop_flag: fp32 tensor of one element; where it is 1, nothing is written or recorded.

        Raises:
            ArgumentTypeError: ``src`` is not plain, or ``dst`` not quantized.
            ArgumentError: another dtype, shape or element format; a ``noop_flag`` of several elements.
        """
        check_plain(f"{type(self).__name__}: src", src)
        if not hasattr(dst, "quantized_storage"):
            raise ArgumentTypeError(
                f"{type(self).__name__}.update_quantized: dst",
                got=f"a {type(dst).__name__}",
                accepted="a QuantizedTensor",
                todo="make one with make_empty(shape) or by quantizing",
            )
        if noop_flag is not None and noop_number(f"{type(self).__name__}.update_quantized", noop_flag) == 1.0:
            return dst
        storage = dst.quantized_storage
        self.quantize_storage(
            src.detach(), rowwise=storage.kind.rowwise, columnwise=storage.kind.columnwise, out=storage
        )
        if isinstance(dst, torch.Tensor) and not dst.is_inference():
            torch.autograd.graph.increment_version(dst)  # as any write in place: autograd and weight caches look at it
        return dst

    def make_empty(
        self,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """A quantized tensor of this format with uninitialised data and all scale_inv 1.

        Args:
            shape: logical shape.
            dtype: nominal dtype.
            device: None means torch's default device.
            requires_grad: of the result.
            pin_memory: page-lock the memory, as torch.empty does.

        Raises:
            ArgumentError: no nominal dtype, or neither usage is set.
        """
        check_nominal(type(self).__name__, dtype)
        self._check_usages()
        kind = StorageKind.of(
            self.format,
            self.mode,
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            order=self.columnwise_order,
        )
        allocate = functools.partial(_allocate, pin_memory=pin_memory)
        storage = QuantizedStorage.empty(kind, tuple(shape), dtype, device, allocate)
        for scale_inv in (storage.rowwise_scale_inv, storage.columnwise_scale_inv):
            if scale_inv is not None:
                fill_with_ones(scale_inv, self.mode)
        return wrap(storage, quantizer=self, requires_grad=requires_grad)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose which copies :meth:`quantize` makes; None leaves a choice as it is.

        Raises:
            ArgumentError: neither a bool nor None.
        """
        for name, usage in (("rowwise", rowwise), ("columnwise", columnwise)):
            check_usage(f"{type(self).__name__}.set_usage: {name}", usage)
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """The copies that :meth:`quantize` makes."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    @property
    def delayed(self) -> bool:
        """Whether the scale is given beforehand and amax is recorded on the way."""
        return False

    def ordered(self, order: ColumnwiseOrder) -> Quantizer:
        """A quantizer with the same settings whose columnwise copies have this memory order; itself if they do.

        Where a format has but one order, that stays.
        """
        order = order_of(self.mode, order)
        if self.columnwise_order == order:
            return self
        made = self.copy()
        made.columnwise_order = order
        return made

    def copy(self) -> Quantizer:
        """A quantizer with the same settings; scale and amax tensors are shared, usages are not."""
        return copy.copy(self)


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None, *, pin_memory: bool
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)
