"""get_cpu_offload_context: what a forward keeps for its backward waits in host memory."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_hal.modules.arguments import check_size
from te_hal.modules.offload_marks import address, collecting, stays
from te_hal.modules.offload_transfer import StreamTransfer
from te_hal.quantization import QuantizedTensor
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from te_hal.modules.offload_transfer import Transfer

_WHERE = "get_cpu_offload_context"
_REFUSED = declare(
    "get_cpu_offload_context",
    {"double_buffering": False, "manual_synchronization": False, "offload_weights": False},
    {
        **dict.fromkeys(
            ("double_buffering", "manual_synchronization"), "copies run layer by layer, in one order alone"
        ),
        "offload_weights": "parameters stay on the device anyway, so that nothing would be gained",
    },
)
#: A view of less than this share of its memory is copied alone.
_SHARE = 0.25
#: Smaller tensors (a seed, a count) are no trouble, and on the CPU no sign that the model is there.
_FEW = 16


def get_cpu_offload_context(  # noqa: D417 - arguments of later features are named together
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,  # noqa: ANN401 - torch.Stream, or a device's own
) -> tuple[AbstractContextManager[Any], Callable[[torch.Tensor], torch.Tensor]]:
    """A context for the forward of each layer, and a function for what each layer gave.

    As in::

        context, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=3)
        for layer in layers:
            with context:
                x = layer(x)
            x = synchronize(x)

    What a layer keeps for its backward is copied to pinned host memory on a stream of its own while the next one runs,
    and back while the backward of the one behind it runs. Gradients are bit for bit the same. Parameters, their
    quantized copies, what :func:`mark_not_offload` marked and tensors of fewer than 16 elements stay.

    Args:
        enabled: else neither does anything.
        num_layers: how many of the ``model_layers`` are offloaded, from the first.
        model_layers: how often the context is entered in a forward.
        offload_activations: must be True where ``enabled``.
        offload_weights: True is refused: parameters stay on the device, so that nothing would be gained.
        double_buffering, manual_synchronization: of later features; anything but the default is refused.
        retain_pinned_cpu_buffers: keep host memory for the next forward.
        offload_stream: the stream that copies; None: one of its own.

    Returns:
        The context, which may be entered again and again, not twice at once; what raises in it ends that forward, and
        layers are counted anew. The function, which takes and gives a tensor.

    Raises:
        ArgumentError: a number or flag that cannot be.
        UnsupportedError: an argument as above; inside the context, a tensor on the CPU, where there is nothing to
            offload to.
    """
    refuse(_WHERE, locals(), _REFUSED)
    flags = {
        "enabled": enabled,
        "offload_activations": offload_activations,
        "retain_pinned_cpu_buffers": retain_pinned_cpu_buffers,
    }
    check_flags(_WHERE, flags)
    _check_layers(num_layers, model_layers)
    if not enabled:
        return nullcontext(), _same
    if not offload_activations:
        raise ArgumentError(
            f"{_WHERE}: offload_activations",
            got="False with enabled=True",
            accepted="True: activations are all that is offloaded",
            todo="pass enabled=False",
        )
    layers = OffloadedLayers(num_layers, model_layers, StreamTransfer(offload_stream, retain=retain_pinned_cpu_buffers))
    return layers, layers.synchronize


def _check_layers(num_layers: int, model_layers: int) -> None:
    check_size(f"{_WHERE}: num_layers", num_layers)
    check_size(f"{_WHERE}: model_layers", model_layers)
    if num_layers > model_layers:
        raise ArgumentError(
            f"{_WHERE}: num_layers",
            got=f"{num_layers} with model_layers={model_layers}",
            accepted="at most model_layers",
            todo="correct one of the two",
        )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Moved:
    """Memory that waits on the host, shared by all that was kept of it."""

    __slots__ = ("__weakref__", "_buffer", "_copy", "_transfer")

    def __init__(self, buffer: torch.Tensor, transfer: Transfer) -> None:
        self._transfer, self._copy = transfer, transfer.to_host(buffer)
        self._buffer: torch.Tensor | None = None
        weakref.finalize(self, transfer.release, self._copy).atexit = False

    def fetch(self) -> torch.Tensor:
        """Memory on the device, on its way back from now on, or there."""
        if self._buffer is None:
            self._buffer = self._transfer.to_device(self._copy)
        return self._buffer

    def buffer(self) -> torch.Tensor:
        """The same, for which what is launched next waits."""
        buffer = self.fetch()
        self._transfer.await_device(buffer)
        return buffer


class _Kept(NamedTuple):
    """One tensor over moved memory, in place of itself."""

    moved: _Moved
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def restore(self) -> torch.Tensor:
        """The tensor, with the strides it had."""
        buffer = self.moved.buffer()
        made = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return made.set_(buffer.untyped_storage(), self.offset, self.shape, self.stride)


class _Layer:
    """What one stay in the context moved: all of it, and the latest by place in memory."""

    __slots__ = ("all", "at")

    def __init__(self) -> None:
        self.all: list[weakref.ref[_Moved]] = []
        self.at: dict[object, tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}

    def fetch(self) -> None:
        for reference in self.all:
            moved = reference()
            if moved is not None:
                moved.fetch()


class OffloadedLayers:
    """The context of get_cpu_offload_context, and its function.

    Args:
        num_layers, model_layers: as there.
        transfer: who moves.
    """

    def __init__(self, num_layers: int, model_layers: int, transfer: Transfer) -> None:
        self._wanted, self._count, self._transfer = num_layers, model_layers, transfer
        self._entered = 0
        self._layers: list[_Layer] = []
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        if self._stack is not None:
            raise StateError(
                _WHERE, got="a context that is already entered", accepted="one use at a time", todo="leave it first"
            )
        if self._entered % self._count == 0:
            self._layers = []
        offloads = self._entered % self._count < self._wanted
        self._entered += 1
        layer = _Layer()
        self._layers.append(layer)
        self._stack = ExitStack()
        if offloads:
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._pack(tensor, layer), _unpack)
            self._stack.enter_context(collecting())
            self._stack.enter_context(hooks)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        if error is not None:
            self._entered = 0  # the forward ends here, so the next one begins with its first layer
        if stack is not None:
            stack.close()

    def synchronize(self, tensor: object) -> torch.Tensor:
        """What a layer gave, unchanged: where its gradient arrives, the way back of what the layer moved begins.

        That of the layer before it begins too, so that it is there when its turn comes.

        Raises:
            ArgumentTypeError: no tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            got = f"a {type(tensor).__name__}"
            raise ArgumentTypeError(_WHERE, got=got, accepted="a tensor, what the layer gave", todo="pass it")
        found: torch.Tensor = _Boundary.apply(tensor, self._layers[-2:])  # type: ignore[no-untyped-call]
        return found

    def _pack(self, tensor: torch.Tensor, layer: _Layer) -> torch.Tensor | _Kept:
        if not self._transfer.takes(tensor.device) and tensor.numel() >= _FEW and tensor.device.type == "cpu":
            raise UnsupportedError(
                _WHERE,
                got=f"a tensor {tuple(tensor.shape)} on the CPU",
                accepted="tensors on an accelerator",
                todo="leave the context out or pass enabled=False: there is nothing to offload to",
            )
        if isinstance(tensor, QuantizedTensor) or tensor.numel() < _FEW or not self._transfer.takes(tensor.device):
            return tensor
        if stays(tensor):
            return tensor
        return _kept(tensor, layer, self._transfer)


def _unpack(kept: torch.Tensor | _Kept) -> torch.Tensor:
    return kept.restore() if isinstance(kept, _Kept) else kept


def _kept(tensor: torch.Tensor, layer: _Layer, transfer: Transfer) -> torch.Tensor | _Kept:
    """A tensor over moved memory, which all that share memory share. Itself where it is a loose part of much."""
    storage = tensor.untyped_storage()
    if tensor.nbytes >= _SHARE * storage.nbytes():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        moved = _moved(layer, (address(tensor), tensor._version), transfer, whole)  # noqa: SLF001 - no public name
        return _Kept(moved, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
    if not tensor.is_contiguous():
        return tensor
    place = (address(tensor), tensor.storage_offset(), tensor.nbytes, tensor._version)  # noqa: SLF001 - no public name
    return _Kept(_moved(layer, place, transfer, tensor), tensor.dtype, 0, tensor.shape, tensor.stride())


def _moved(layer: _Layer, place: object, transfer: Transfer, tensor: torch.Tensor) -> _Moved:
    """The memory of ``tensor``, moved now, or before if it is the same and was not written to since."""
    held, reference = layer.at.get(place, (None, None))
    alive = held is not None and not held.expired()  # type: ignore[no-untyped-call]
    moved = reference() if alive and reference is not None else None
    if moved is None:
        moved = _Moved(tensor.detach().reshape(-1).view(torch.uint8), transfer)
        held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        layer.at[place] = held, weakref.ref(moved)
        layer.all.append(weakref.ref(moved))
    return moved


class _Boundary(torch.autograd.Function):
    """Identity that tells, as a gradient comes through, that a layer's backward is about to begin."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layers: list[_Layer]) -> torch.Tensor:  # noqa: ANN401 - autograd's context
        """The tensor; ``layers`` are the one before and the one that gave it."""
        ctx.layers = layers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        """The gradient."""
        for layer in reversed(ctx.layers):
            layer.fetch()
        return grad, None
