"""Float8Tensor: a quantized storage as a ``torch.Tensor``, for users and for values that leave a module."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

import te_hal.ops
from te_hal.quantization import float8_operations
from te_hal.schema.errors import StateError
from te_hal.schema.formats import FORMATS, ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from te_hal.quantization.quantizer import Quantizer
    from te_hal.schema.formats import DType


class Float8Tensor(torch.Tensor):
    """A per-tensor quantized tensor with the nominal dtype, shape and device of what it stands for.

    Torch operations that a format defines keep it quantized: ``detach``, ``clone``, ``view``/``reshape``, ``.to``
    of another nominal dtype or device, and ``copy_`` into it: bytes from a tensor of the same shape and kind,
    quantizing from any other. Other in-place operations, assignment to an index among them, dequantize, compute and
    quantize back. Everything else dequantizes its operands and returns a plain tensor: ``q.t()`` and ``q[0]`` are
    copies, and writing to them does not change ``q``.

    A deep copy shares nothing. So does a pickle, which holds the bytes but no quantizer, so that what is loaded
    refuses in-place operations. ``torch.load(weights_only=True)`` needs
    ``torch.serialization.safe_globals([rebuild_float8_tensor])`` from this file.

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
    def _transpose_invalid(self) -> bool:
        return self.quantized_storage.columnwise_data is None

    @property
    def _scale_inv(self) -> torch.Tensor | None:
        return self.quantized_storage.copy_to_read()[1]

    @property
    def _fp8_dtype(self) -> DType:
        return self.quantized_storage.format.code

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
                got="a tensor without a quantizer (loaded, or a view that leaves the columnwise copy out)",
                accepted="one made by a quantizer",
                todo="quantize anew, or write to the tensor that the view is of",
            )
        return self._quantizer

    @property
    def data(self) -> Float8Tensor:
        """This tensor without autograd. Assigning a Float8Tensor takes it over whole, anything else is quantized.

        Raises:
            StateError: assigning a plain tensor to one that has no quantizer.
            ArgumentError: assigning a plain tensor of another shape, or of a dtype that is not quantized.
        """
        return self.detach()  # type: ignore[return-value] # kept quantized

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, Float8Tensor):
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined] # dtype, shape and device
            self.quantized_storage = value.quantized_storage
        else:
            self.quantize_(value)

    def __setitem__(self, index: Any, value: Any) -> None:  # noqa: ANN401 - what torch takes
        """Dequantize, assign, and quantize back.

        Raises:
            StateError: this tensor has no quantizer, or autograd would have to follow.
        """
        self._own_quantizer()
        follows = self.requires_grad or (isinstance(value, torch.Tensor) and value.requires_grad)
        if follows and torch.is_grad_enabled():
            raise StateError(
                "Float8Tensor: assignment to an index",
                got="a tensor that requires a gradient",
                accepted="tensors that autograd does not follow",
                todo="assign under torch.no_grad(), or build the values before quantizing them",
            )
        plain = te_hal.ops.dequantize(self.quantized_storage)
        plain[index] = value
        self.quantize_(plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensor:
        """A leaf with copied bytes, quantizer and attributes.

        Raises:
            StateError: the result of a computation that autograd follows; torch copies none of these.
        """
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise StateError(
                "Float8Tensor: deepcopy",
                got="a tensor with a gradient function",
                accepted="a leaf, as for any tensor",
                todo="copy its detach()",
            )
        buffers = tuple(copy.deepcopy(buffer, memo) for buffer in self.quantized_storage.tensors())
        made = memo[id(self)] = Float8Tensor(
            self.quantized_storage.with_tensors(buffers),
            quantizer=copy.deepcopy(self._quantizer, memo),
            requires_grad=self.requires_grad,
        )
        made.__dict__.update(copy.deepcopy(self._attributes(), memo))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Any, ...]:
        storage = self.quantized_storage
        arguments = (
            *(storage.format.name, storage.mode.value, storage.shape, storage.dtype),
            *(storage.tensors(), storage.columnwise_order.value, self.requires_grad, self._attributes()),
        )
        return rebuild_float8_tensor, arguments

    def _attributes(self) -> dict[str, Any]:
        """What others have put on this tensor."""
        return {name: value for name, value in self.__dict__.items() if name not in Float8Tensor.__annotations__}

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's stub hides the name
        storage = self.quantized_storage
        facts = [f"{storage.kind!r}", f"dtype={storage.dtype}", f"scale_inv={self._scale_inv}"]
        facts += [f"requires_grad={self.requires_grad}"] * self.requires_grad
        return f"Float8Tensor({_values_to_show(storage)}, {', '.join(facts)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub leaves `cls, func` out
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the torch operation returns
        return float8_operations.run(cls, func, args, dict(kwargs or {}))


def rebuild_float8_tensor(
    format: str,
    mode: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    buffers: tuple[torch.Tensor | None, ...],
    columnwise_order: str,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> Float8Tensor:
    """What a pickle calls: a Float8Tensor over these buffers, without a quantizer."""
    row, row_scale, column, column_scale = buffers
    storage = QuantizedStorage(
        format=FORMATS[format],
        mode=ScalingMode(mode),
        shape=tuple(shape),
        dtype=dtype,
        rowwise_data=row,
        rowwise_scale_inv=row_scale,
        columnwise_data=column,
        columnwise_scale_inv=column_scale,
        columnwise_order=ColumnwiseOrder(columnwise_order),
    )
    made = Float8Tensor(storage, requires_grad=requires_grad)
    made.__dict__.update(attributes)
    return made


def _values_to_show(storage: QuantizedStorage) -> torch.Tensor | str:
    """By torch alone: printing works where no backend does."""
    codes, scale_inv, transposed = storage.copy_to_read()
    if codes.is_meta:
        return f"shape={storage.shape}, device={storage.device}"
    if transposed:
        codes = codes.movedim(0, -1)
    values = codes.cpu().contiguous().view(storage.format.dtype).to(torch.float32) * scale_inv.cpu()
    return values.to(storage.dtype)


class _Dequantize(torch.autograd.Function):
    """Back to plain values; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, tensor: Float8Tensor, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401, ARG004
        return te_hal.ops.dequantize(tensor.quantized_storage, out_dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401, ARG004
        return grad, None
