"""QuantizedTensor: a quantized storage as a ``torch.Tensor``, for users and for values that leave a module."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import torch

from te_hal.quantization import quantized_operations
from te_hal.quantization.copies import with_usages
from te_hal.quantization.hybrid_storage import values_of
from te_hal.quantization.separate_buffers import SeparateBuffers, forbid_address
from te_hal.quantization.te_constructors import chosen_storage
from te_hal.quantization.te_names import TeNames
from te_hal.quantization.tensor_text import text_of
from te_hal.schema.errors import ArgumentError, StateError
from te_hal.schema.formats import FORMATS, ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from te_hal.quantization.quantizer import Quantizer


class QuantizedTensor(SeparateBuffers, TeNames, torch.Tensor):
    """A quantized tensor with the nominal dtype, shape and device of what it stands for; a class per kind of scales.

    Torch operations that a format defines keep it quantized: ``detach``, ``clone``, ``view``/``reshape`` (with scales
    per block only where the last dimension stays), ``split``/``chunk`` along the first dimension (where no block is
    cut) or, with one scale, any (parts refuse in-place operations), ``.to`` of another nominal dtype or device,
    ``empty_like``, and ``copy_`` into it: bytes from a tensor of the same shape and kind, quantizing from any other.
    Other in-place operations, assignment to an index among them, dequantize, compute and quantize back. Everything
    else dequantizes its operands and returns a plain tensor: ``q.t()`` and ``q[0]`` are copies, and writing to them
    does not change ``q``.

    A deep copy shares nothing. So does a pickle, which holds the bytes but no quantizer, so that what is loaded
    refuses in-place operations. ``torch.load(weights_only=True)`` needs
    ``torch.serialization.safe_globals([rebuild_quantized_tensor])`` from this file.

    Args:
        storage: the data; shared, not copied. Or the shape, as Transformer Engine's classes take it; then ``dtype`` and
            the arguments of the class's storage, by name, say what the tensor holds (te_constructors).
        dtype: nominal dtype, with a shape only.
        shape, device: with a shape only: the shape by its name; where the buffers lie.
        quantizer: used by in-place operations; None refuses them.
        requires_grad: as for any tensor.

    Attributes:
        quantized_storage: the storage that modules and ops work with.
    """

    quantized_storage: QuantizedStorage
    _quantizer: Quantizer | None

    #: Scaling modes of the class; none: those of no other class.
    modes: ClassVar[frozenset[ScalingMode]] = frozenset()

    #: Class of storages whose arguments the class takes, too.
    storage_class: ClassVar[Any] = None

    def __new__(  # noqa: PYI034 - typing.Self needs Python 3.11
        cls,
        storage: QuantizedStorage | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
        **named: Any,  # noqa: ANN401 - what the storage class takes
    ) -> QuantizedTensor:
        """Wrap a storage; see the class.

        Raises:
            ArgumentError: a storage of a scaling mode that belongs to another class, or buffers that do not fit.
            ArgumentTypeError: an argument that does not go with the others.
        """
        held = chosen_storage(cls, storage, dtype, shape=shape, device=device, quantizer=quantizer, named=named)
        if held.mode not in cls.modes:
            raise ArgumentError(
                cls.__name__,
                got=repr(held),
                accepted=f"scaling mode {', '.join(sorted(mode.value for mode in cls.modes)) or '(none)'}",
                todo="wrap it by te_hal.quantization.quantized_tensor.wrap, which knows the class of every mode",
            )
        made: QuantizedTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way
            cls, held.shape, dtype=held.dtype, device=held.device, requires_grad=requires_grad
        )
        forbid_address(made)
        made.quantized_storage = held
        made._quantizer = quantizer
        return made

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain values, in ``dtype`` or the nominal dtype; gradients pass straight through."""
        return quantized_operations.dequantize(self, dtype or self.dtype)

    def float(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """The plain values in fp32; a Parameter stays quantized, as ``torch.nn.Module.float`` converts by this."""
        return self._in_dtype(torch.float32, memory_format)

    def half(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """The plain values in fp16; a Parameter as with :meth:`float`."""
        return self._in_dtype(torch.float16, memory_format)

    def bfloat16(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """The plain values in bf16; a Parameter as with :meth:`float`."""
        return self._in_dtype(torch.bfloat16, memory_format)

    def _in_dtype(self, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
        if isinstance(self, torch.nn.Parameter):
            return self.to(dtype, memory_format=memory_format)
        return self.dequantize(dtype=dtype).contiguous(memory_format=memory_format)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> QuantizedTensor:
        """Quantize ``tensor`` into this one, in place, with the quantizer this one was made by.

        Raises:
            StateError: this tensor has no quantizer.
        """
        return self._own_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Have in-place operations quantize by another quantizer that makes what this tensor holds, with a warning.

        Raises:
            StateError: this tensor has no quantizer.
            ArgumentError: one of another format or other blocks.
        """
        before, storage = self._own_quantizer(), self.quantized_storage
        if quantizer.mode is not storage.mode or (before.quantizes and quantizer.format is not storage.format):
            raise ArgumentError(
                f"{type(self).__name__}.update_quantizer",
                got=f"a {type(quantizer).__name__}, which makes something else",
                accepted=f"one that makes {storage.kind!r}",
                todo="quantize the dequantized values by it instead",
            )
        if quantizer is not before:
            warnings.warn(f"{type(self).__name__}: what is written from now on is quantized differently", stacklevel=2)
            self._quantizer = quantizer

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make or drop copies in place; the other is kept as it is where its argument is None.

        Args:
            rowwise_usage: True: make the rowwise copy if it is not there. False: drop it.
            columnwise_usage: the same for the columnwise copy.

        Raises:
            ArgumentError: an argument is no bool, or no copy would be left.
            UnsupportedError: a copy is missing that does not follow from the other without rounding again.
        """
        storage, kind = self.quantized_storage, type(self).__name__
        self.quantized_storage = with_usages(kind, storage, self._quantizer, rowwise_usage, columnwise_usage)

    def _get_quantizer(self) -> Quantizer:
        """Transformer Engine's name for the quantizer of this tensor."""
        return self._own_quantizer()

    def _own_quantizer(self) -> Quantizer:
        if self._quantizer is None:
            raise StateError(
                f"{type(self).__name__}: in-place operation",
                got="a tensor without a quantizer (loaded, or a view that leaves the columnwise copy out)",
                accepted="one made by a quantizer",
                todo="quantize anew, or write to the tensor that the view is of",
            )
        return self._quantizer

    @property
    def data(self) -> QuantizedTensor:
        """This tensor without autograd. Assigning one of its class takes it over whole, anything else is quantized.

        Raises:
            StateError: assigning a plain tensor to one that has no quantizer.
            ArgumentError: assigning a plain tensor of a dtype or shape that is not quantized.
        """
        return self.detach()  # type: ignore[return-value] # kept quantized

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, QuantizedTensor):
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined] # dtype, shape and device
            self.quantized_storage = value.quantized_storage
        else:
            self._take_plain(value)

    def _take_plain(self, value: torch.Tensor) -> None:
        """Quantize it into this tensor; one of another shape, dtype or device into new buffers."""
        if (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device):
            self.quantize_(value)
            return
        with torch.no_grad():
            quantizer, usages = self._own_quantizer(), self.get_usages()
            self.data = wrap(
                quantizer.quantize_storage(value, rowwise=usages["rowwise"], columnwise=usages["columnwise"]),
                quantizer=quantizer,
            )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - see below; other names are not there
        """The two functions of a weight whose initial value was preserved (quantized_model_init)."""
        attributes, value = self.__dict__, "_high_precision_init_val"
        if value in attributes and name == f"get{value}":
            return lambda: attributes[value]
        if value in attributes and name == f"clear{value}":
            return lambda: attributes.update({value: None})
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    def __setitem__(self, index: Any, value: Any) -> None:  # noqa: ANN401 - what torch takes
        """Dequantize, assign, and quantize back.

        Raises:
            StateError: this tensor has no quantizer, or autograd would have to follow.
        """
        self._own_quantizer()
        follows = self.requires_grad or (isinstance(value, torch.Tensor) and value.requires_grad)
        if follows and torch.is_grad_enabled():
            raise StateError(
                f"{type(self).__name__}: assignment to an index",
                got="a tensor that requires a gradient",
                accepted="tensors that autograd does not follow",
                todo="assign under torch.no_grad(), or build the values before quantizing them",
            )
        plain = values_of(self.quantized_storage)
        plain[index] = value
        self.quantize_(plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        """A leaf with copied bytes, quantizer and attributes.

        Raises:
            StateError: the result of a computation that autograd follows; torch copies none of these.
        """
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise StateError(
                f"{type(self).__name__}: deepcopy",
                got="a tensor with a gradient function",
                accepted="a leaf, as for any tensor",
                todo="copy its detach()",
            )
        buffers = tuple(copy.deepcopy(buffer, memo) for buffer in self.quantized_storage.tensors())
        made = memo[id(self)] = type(self)(
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
        return rebuild_quantized_tensor, arguments

    def _attributes(self) -> dict[str, Any]:
        """What others have put on this tensor."""
        return {name: value for name, value in self.__dict__.items() if name not in QuantizedTensor.__annotations__}

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's stub hides the name
        return f"{type(self).__name__}({text_of(self.quantized_storage, requires_grad=self.requires_grad)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub leaves `cls, func` out
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the torch operation returns
        return quantized_operations.run(QuantizedTensor, func, args, dict(kwargs or {}))


def wrap(
    storage: QuantizedStorage, *, quantizer: Quantizer | None = None, requires_grad: bool = False
) -> QuantizedTensor:
    """The tensor over a storage, of the class that its scaling mode has; arguments as of QuantizedTensor."""
    return tensor_class(storage.mode)(storage, quantizer=quantizer, requires_grad=requires_grad)


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the plain one that a quantized one stands for, in its nominal dtype; with autograd."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def tensor_class(mode: ScalingMode) -> type[QuantizedTensor]:
    """The class of tensors with a scaling mode.

    Raises:
        ArgumentError: there is none yet.
    """
    for known in QuantizedTensor.__subclasses__():
        if mode in known.modes:
            return known
    raise ArgumentError(
        "QuantizedTensor", got=f"scaling mode {mode.value!r}", accepted="one that is built", todo="dequantize it first"
    )


def rebuild_quantized_tensor(
    format: str,
    mode: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    buffers: tuple[torch.Tensor | None, ...],
    columnwise_order: str,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> QuantizedTensor:
    """What a pickle calls: a quantized tensor over these buffers, without a quantizer."""
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
    made = wrap(storage, requires_grad=requires_grad)
    made.__dict__.update(attributes)
    return made
