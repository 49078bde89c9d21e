"""HybridQuantizer: the two directions of a tensor by a quantizer each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

import te_hal.ops
from te_hal.quantization.hybrid_storage import HybridMode, HybridStorage
from te_hal.quantization.linear_calls import NO_COPIES, Copies
from te_hal.quantization.quantized_tensor import wrap
from te_hal.quantization.quantizer import OPS, CastKernels, Quantizer
from te_hal.quantization.quantizer_arguments import wrong
from te_hal.quantization.unquantized import UnquantizedQuantizer
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.quantization.hybrid_storage import Part
    from te_hal.quantization.quantized_tensor import QuantizedTensor
    from te_hal.schema.formats import ColumnwiseOrder

_SOURCES = ("original", "rowwise_dequantized")


class HybridCasts(NamedTuple):
    """What a module's plan binds for a HybridQuantizer, in the place of CastKernels.

    Attributes:
        rowwise, columnwise: kernels of the two casts.
        copies: which copies of the codes either makes; None for a part that nobody reads.
        dequantize: gives the second cast what the first one's codes stand for.
    """

    rowwise: CastKernels = OPS
    columnwise: CastKernels = OPS
    copies: tuple[Copies | None, Copies | None] = (NO_COPIES, NO_COPIES)
    dequantize: Callable[..., Any] = te_hal.ops.dequantize


class HybridQuantizer(Quantizer):
    """Quantizes what one product reads by one quantizer and what the other reads by another one (docs/numerics.md, F7).

    Of an input and a weight, fprop reads the rowwise part; wgrad, and dgrad, the columnwise one. Of a gradient, dgrad
    reads the rowwise part, wgrad the columnwise one. As the result of a layer (``fp8_output``, ``fp8_grad``) it is the
    rowwise quantizer alone. The parts are copies: a quantizer that is handed over is not changed.

    Args:
        rowwise_quantizer, columnwise_quantizer: two objects; te.IdentityQuantizer keeps its part in high precision.
        columnwise_source: what the second one gets: the tensor (``"original"``), or what the first one's codes stand
            for (``"rowwise_dequantized"``).

    Raises:
        ArgumentTypeError: a request, a HybridQuantizer, or no te.Quantizer at all.
        ArgumentError: one object for both; an unknown source.
    """

    mode: Any = HybridMode.HYBRID

    def __init__(
        self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer, columnwise_source: str = "original"
    ) -> None:
        given = {"rowwise_quantizer": rowwise_quantizer, "columnwise_quantizer": columnwise_quantizer}
        for name, child in given.items():
            if not isinstance(child, Quantizer) or isinstance(child, HybridQuantizer):
                raise ArgumentTypeError(
                    f"HybridQuantizer: {name}",
                    got=f"a {type(child).__name__}",
                    accepted="a te.Quantizer that is ready to quantize, and no HybridQuantizer",
                    todo="make it first; a DelayedScalingRequest serves whole tensors only",
                )
        if rowwise_quantizer is columnwise_quantizer:
            raise ArgumentError(
                "HybridQuantizer: columnwise_quantizer",
                got="the object that is rowwise_quantizer too",
                accepted="one of its own: each makes its own part",
                todo="pass its copy(), or use the quantizer by itself",
            )
        if columnwise_source not in _SOURCES:
            raise wrong("HybridQuantizer: columnwise_source", columnwise_source, ", ".join(map(repr, _SOURCES)))
        super().__init__(rowwise_quantizer.format, rowwise=True, columnwise=True)
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer.copy(), columnwise_quantizer.copy()
        self.rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        self.columnwise_quantizer.set_usage(rowwise=False, columnwise=True)
        self.columnwise_source = columnwise_source

    @property
    def chained(self) -> bool:
        """Whether the columnwise part is made of what the rowwise one stands for."""
        return self.columnwise_source == _SOURCES[1]

    def operand(  # type: ignore[override] # two parts in place of one storage
        self, tensor: torch.Tensor, *, rowwise: bool, columnwise: bool, kernels: CastKernels | HybridCasts = OPS
    ) -> HybridStorage:
        """What a module's products read, both parts as its plan says."""
        if not isinstance(kernels, HybridCasts):
            return self.quantize_storage(tensor, rowwise=rowwise or not columnwise, columnwise=columnwise)
        return self._parts(tensor, kernels)

    def quantize_storage(  # type: ignore[override] # the same
        self,
        tensor: torch.Tensor,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        out: Any = None,  # noqa: ANN401 - a HybridStorage, which is checked
        kernels: CastKernels = OPS,
    ) -> HybridStorage:
        """Both parts for a user: the rowwise copy of one quantizer, the columnwise copy of the other.

        Raises:
            ArgumentError: ``out`` was made by other quantizers; and as the two quantizers.
        """
        copies: tuple[Copies | None, Copies | None] = (
            Copies(True, False) if rowwise else None,
            Copies(False, True) if columnwise else None,
        )
        parts: tuple[Any, Any] = (None, None)
        if out is not None:
            if not isinstance(out, HybridStorage) or out.shape != tuple(tensor.shape):
                raise self._no_refill(out, tensor)
            parts = out.rowwise, out.columnwise
            children = self.rowwise_quantizer, self.columnwise_quantizer
            if not all(map(_is_made_by, parts, children, (rowwise, columnwise))):
                raise self._no_refill(out, tensor)
            copies = _copies_of(out.rowwise), _copies_of(out.columnwise)
        made = self._parts(tensor, HybridCasts(kernels, kernels, copies), parts)
        if out is not None:
            return out  # type: ignore[no-any-return] # a HybridStorage
        # A part in high precision is the tensor itself until here.
        owned = [part.clone() if isinstance(part, torch.Tensor) else part for part in (made.rowwise, made.columnwise)]
        return HybridStorage(*owned, shape=made.shape, dtype=made.dtype)

    def _parts(self, tensor: torch.Tensor, casts: HybridCasts, out: tuple[Any, Any] = (None, None)) -> HybridStorage:
        tensor = tensor.detach()
        wanted_row, wanted_column = casts.copies
        row = column = None
        if wanted_row is not None or self.chained:
            made = Copies(True, False) if wanted_row is None else wanted_row
            row = self._part(self.rowwise_quantizer, tensor, made, casts.rowwise, out[0])
        if wanted_column is not None:
            source = tensor
            if self.chained:
                quantized = isinstance(row, QuantizedStorage)
                source = casts.dequantize(row, out_dtype=tensor.dtype) if quantized else row  # type: ignore[assignment] # made above
            column = self._part(self.columnwise_quantizer, source, wanted_column, casts.columnwise, out[1])
        kept = row if wanted_row is not None else None
        return HybridStorage(kept, column, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def _part(
        self,
        child: Quantizer,
        tensor: torch.Tensor,
        copies: Copies,
        kernels: CastKernels,
        out: Any,  # noqa: ANN401 - a Part or None
    ) -> Part:
        if isinstance(child, UnquantizedQuantizer):
            plain = child.simulate(tensor)
            return plain if out is None else out.copy_(plain)
        part = child.quantize_storage(
            tensor, rowwise=copies.rowwise, columnwise=copies.columnwise, out=out, kernels=kernels
        )
        self.tell_observer(part, tensor)
        return part

    def _no_refill(self, out: object, tensor: torch.Tensor) -> ArgumentError:
        return ArgumentError(
            "HybridQuantizer: out",
            got=f"{getattr(out, 'kind', type(out).__name__)!r} of shape {getattr(out, 'shape', None)}",
            accepted=f"of its own making, of shape {tuple(tensor.shape)}, with the parts that are asked for",
            todo="leave it out, or quantize with the quantizer that made it",
        )

    def make_empty(self, shape: tuple[int, ...], **settings: Any) -> QuantizedTensor:  # noqa: ANN401 - as there
        """See :meth:`Quantizer.make_empty`. A part in high precision has uninitialised values."""
        requires_grad = settings.pop("requires_grad", False)
        self._check_usages()
        children = (
            self.rowwise_quantizer if self.rowwise_usage else None,
            self.columnwise_quantizer if self.columnwise_usage else None,
        )
        parts = [None if child is None else _empty_part(child, shape, settings) for child in children]
        dtype = next(part.dtype for part in parts if part is not None)
        storage: Any = HybridStorage(*parts, shape=tuple(shape), dtype=dtype)
        return wrap(storage, quantizer=self, requires_grad=requires_grad)

    def fused_arguments(self, *, rowwise: bool, columnwise: bool) -> NoReturn:
        """Refused: an op that computes and casts makes one format.

        Raises:
            StateError: always.
        """
        raise StateError(
            "HybridQuantizer.fused_arguments",
            got=f"rowwise={rowwise}, columnwise={columnwise} of one cast",
            accepted="operand(tensor), which casts twice",
            todo="run the op by itself first",
        )

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether both quantizers take such a tensor."""
        return self.rowwise_quantizer.is_quantizable(inp) and self.columnwise_quantizer.is_quantizable(inp)

    def is_requantization_safe(self) -> bool:
        """Whether casting again gives the same codes in both parts, and records nothing."""
        children = self.rowwise_quantizer, self.columnwise_quantizer
        return all(child.is_requantization_safe() for child in children)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Record what both quantizers record."""
        self.rowwise_quantizer.calibrate(tensor)
        self.columnwise_quantizer.calibrate(tensor)

    def ordered(self, order: ColumnwiseOrder) -> HybridQuantizer:
        """A quantizer whose parts have this memory order where their format has a choice; itself if they do."""
        children = self.rowwise_quantizer.ordered(order), self.columnwise_quantizer.ordered(order)
        if children[0] is self.rowwise_quantizer and children[1] is self.columnwise_quantizer:
            return self
        made = super().copy()
        made.rowwise_quantizer, made.columnwise_quantizer = children  # type: ignore[attr-defined] # a copy of this
        return made  # type: ignore[return-value] # the same

    def copy(self) -> HybridQuantizer:
        """A quantizer with the same settings and quantizers of its own."""
        made: HybridQuantizer = super().copy()  # type: ignore[assignment] # a copy of this
        made.rowwise_quantizer, made.columnwise_quantizer = (
            self.rowwise_quantizer.copy(),
            self.columnwise_quantizer.copy(),
        )
        return made


def _is_made_by(part: Part | None, child: Quantizer, wanted: bool) -> bool:
    """Whether a part is one that a quantizer can fill again, where it is wanted; else that there is none."""
    if part is None or not wanted:
        return part is None and not wanted
    if isinstance(child, UnquantizedQuantizer):
        return isinstance(part, torch.Tensor)
    return isinstance(part, QuantizedStorage) and part.format is child.format and part.mode is child.mode


def _copies_of(part: Part | None) -> Copies | None:
    """Those that a part has, whichever its product reads."""
    if not isinstance(part, QuantizedStorage):
        return None if part is None else NO_COPIES
    return Copies(part.kind.rowwise, part.kind.columnwise)


def _empty_part(child: Quantizer, shape: tuple[int, ...], settings: dict[str, Any]) -> Any:  # noqa: ANN401 - a Part
    if not child.quantizes:
        return torch.empty(shape, **settings)
    return child.make_empty(shape, **settings).quantized_storage
