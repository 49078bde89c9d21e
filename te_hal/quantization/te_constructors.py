"""What a quantized tensor holds where its class is called with Transformer Engine's constructor arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from te_hal.quantization.quantizer import Quantizer


def chosen_storage(
    tensor_class: Any,  # noqa: ANN401 - a class of quantized tensors
    storage: Any,  # noqa: ANN401 - a storage of any class, a shape, or None
    dtype: torch.dtype | None,
    *,
    shape: Sequence[int] | None,
    device: torch.device | str | None,
    quantizer: Quantizer | None,
    named: Mapping[str, Any],
) -> Any:  # noqa: ANN401 - a storage of any class
    """The storage that was passed, or one of Transformer Engine's arguments; see :func:`_built`.

    Raises:
        ArgumentTypeError: a storage and arguments that only go with a shape, two shapes, or neither.
    """
    where = tensor_class.__name__
    others = {"dtype": dtype, "shape": shape, "device": device, **named}
    if hasattr(storage, "kind"):
        strange = [name for name in others if name in named or others[name] is not None]
        if not strange:
            return storage
        got = f"a storage and {', '.join(strange)}"
        raise ArgumentTypeError(where, got=got, accepted="a storage alone", todo="leave them out: the storage says it")
    if (storage is None) is (shape is None):
        got = "neither a storage nor a shape" if shape is None else "two shapes"
        raise ArgumentTypeError(where, got=got, accepted="a storage, or one shape and its buffers", todo="pass one")
    sizes: Any = shape if storage is None else storage
    if isinstance(sizes, torch.Tensor) or not all(isinstance(size, int) for size in sizes):
        got = f"a {type(sizes).__name__}"
        raise ArgumentTypeError(f"{where}: shape", got=got, accepted="ints, or a storage", todo="quantize a tensor")
    return _built(where, tensor_class.storage_class, sizes, dtype, device=device, quantizer=quantizer, named=named)


def _built(
    where: str,
    storage_class: Any,  # noqa: ANN401 - a class of te_storages or te_part_storages, or None
    shape: Sequence[int],
    dtype: torch.dtype | None,
    *,
    device: torch.device | str | None,
    quantizer: Quantizer | None,
    named: Mapping[str, Any],
) -> Any:  # noqa: ANN401 - a storage of any class
    """A storage over the buffers that ``named`` gives, built and checked by the storage class.

    Args:
        where: name of the tensor class, for messages.
        storage_class: of Transformer Engine's names; None: the format has none.
        shape: logical shape, of which the buffers have to be.
        dtype: nominal dtype.
        device: where the buffers have to lie; None: wherever they do.
        quantizer: one that makes what the buffers hold, or None.
        named: the other arguments of the storage class.

    Raises:
        ArgumentTypeError: an argument that the class does not have, one that is missing, or no dtype.
        ArgumentError: buffers or a quantizer that do not fit.
    """
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(
            f"{where}: dtype", got=repr(dtype), accepted="a torch.dtype", todo="pass the nominal one"
        )
    if named.get("fake_dtype", dtype) is not dtype:
        raise _unfit(where, "fake_dtype", repr(named["fake_dtype"]), f"{dtype}, which dtype says")
    arguments = {**named, "quantizer": quantizer, "fake_dtype": dtype}
    _check_names(where, storage_class, arguments)
    if quantizer is not None and quantizer.mode not in storage_class.modes:
        raise _unfit(where, "quantizer", f"a {type(quantizer).__name__}", f"one that makes a {where}, or None")
    storage = storage_class(**arguments)
    if tuple(shape) != storage.shape:
        raise _unfit(where, "shape", str(tuple(shape)), f"{storage.shape}, which the buffers have")
    if device is not None and not _is_of(torch.device(device), storage.device):
        raise _unfit(where, "device", str(device), f"{storage.device}, where the buffers lie")
    if quantizer is not None and (
        quantizer.mode is not storage.mode or (storage.format is not None and quantizer.format is not storage.format)
    ):
        raise _unfit(where, "quantizer", repr(quantizer), f"one that makes {storage.kind!r}, or None")
    return storage.with_tensors(storage.tensors())


def _check_names(where: str, storage_class: Any, arguments: Mapping[str, Any]) -> None:  # noqa: ANN401
    known = [] if storage_class is None else list(inspect.signature(storage_class).parameters.values())
    names = [each.name for each in known]
    missing = [each.name for each in known if each.default is each.empty and each.name not in arguments]
    strange = [name for name in arguments if name not in names]
    if missing or (strange and known):
        raise ArgumentTypeError(
            where,
            got="; ".join(
                f"{what} {', '.join(which)}" for what, which in (("unknown", strange), ("no", missing)) if which
            ),
            accepted=f"shape, dtype, requires_grad, device, {', '.join(names)}",
            todo="pass what get_metadata() of another one gives, or a storage",
        )
    if not known:
        raise ArgumentTypeError(
            where, got="a shape", accepted="a storage: Transformer Engine has no such class", todo="quantize a tensor"
        )


def _is_of(asked: torch.device, device: torch.device) -> bool:
    return asked.type == device.type and asked.index in (None, device.index)


def _unfit(where: str, argument: str, got: str, accepted: str) -> ArgumentError:
    return ArgumentError(f"{where}: {argument}", got=got, accepted=accepted, todo="pass what the buffers are")
