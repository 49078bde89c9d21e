"""Saving quantized storages for backward: as plain tensors, so that torch's saved-tensor hooks see them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from te_hal.quantization.hybrid_storage import HybridStorage
from te_hal.quantization.identity_storage import IdentityStorage
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Saveable = torch.Tensor | QuantizedStorage | HybridStorage | IdentityStorage | None
    Rebuild = Callable[[Sequence[torch.Tensor | None]], Saveable]

_BUFFERS = 4  #: of a storage


def prepare_for_saving(*values: Saveable) -> tuple[list[torch.Tensor | None], list[Rebuild]]:
    """Take values apart.

    Returns:
        Tensors (or None) for ``ctx.save_for_backward``: four per storage, eight per one of two parts, one per tensor;
        and one function per value that puts it together again. The functions hold no tensor.
    """
    tensors: list[torch.Tensor | None] = []
    rebuilds: list[Rebuild] = []
    for value in values:
        if isinstance(value, QuantizedStorage):
            tensors += value.tensors()
            rebuilds.append(partial(_storage, value.kind, value.shape, value.dtype))
        elif isinstance(value, HybridStorage):
            tensors += value.tensors()
            rebuilds.append(partial(_hybrid, value.kind.parts, value.shape, value.dtype))
        elif isinstance(value, IdentityStorage):
            tensors += value.tensors()
            rebuilds.append(_identity)
        else:
            tensors.append(value)
            rebuilds.append(_tensor)
    return tensors, rebuilds


def restore_from_saved(
    rebuilds: Sequence[Rebuild], tensors: Sequence[torch.Tensor | None], return_saved_tensors: bool = False
) -> Any:  # noqa: ANN401 - a list, or a pair
    """The values that :func:`prepare_for_saving` took apart.

    Args:
        rebuilds: the functions that it gave.
        tensors: what it gave besides, and possibly more behind that.
        return_saved_tensors: give what is behind, too.

    Returns:
        The values; with ``return_saved_tensors`` the pair of this and the list of tensors behind those that were read.

    Raises:
        ArgumentError: fewer tensors than the values have; ``return_saved_tensors`` that is no bool.
    """
    if return_saved_tensors is not False:
        check_flags("restore_from_saved", {"return_saved_tensors": return_saved_tensors})
    values: list[Saveable] = []
    position = 0
    for rebuild in rebuilds:
        count = 1 if rebuild is _tensor else 2 * _BUFFERS if getattr(rebuild, "func", None) is _hybrid else _BUFFERS
        if position + count > len(tensors):
            raise ArgumentError(
                "restore_from_saved",
                got=f"{len(tensors)} tensors for {len(rebuilds)} values",
                accepted="all that prepare_for_saving gave",
                todo="save all of them, and pass ctx.saved_tensors",
            )
        values.append(rebuild(tensors[position : position + count]))
        position += count
    return (values, list(tensors[position:])) if return_saved_tensors else values


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:  # noqa: ANN401 - as above; autograd's
    """:func:`restore_from_saved` of what a ``torch.autograd.Function`` kept.

    Args:
        ctx: has ``save_for_backward``'s tensors, and as ``tensor_objects`` what else :func:`prepare_for_saving` gave;
            that becomes None, so that a second backward is refused here.
        return_saved_tensors: as there.

    Returns:
        As there.

    Raises:
        ArgumentError: no ``tensor_objects``, or they were taken before.
    """
    rebuilds = getattr(ctx, "tensor_objects", None)
    if rebuilds is None:
        raise ArgumentError(
            "restore_from_func_ctx: ctx",
            got="no tensor_objects",
            accepted="tensors, ctx.tensor_objects = prepare_for_saving(...), and one backward",
            todo="set it in the forward",
        )
    found = restore_from_saved(rebuilds, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return found


def _tensor(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    return tensors[0]


def _identity(tensors: Sequence[torch.Tensor | None]) -> IdentityStorage:
    return IdentityStorage(tensors[0])  # type: ignore[arg-type] # there is one


def _hybrid(
    kinds: tuple[Any, Any], shape: tuple[int, ...], dtype: torch.dtype, tensors: Sequence[torch.Tensor | None]
) -> HybridStorage:
    halves = (tensors[:_BUFFERS], tensors[_BUFFERS:])
    row, column = (
        _storage(kind, shape, dtype, half) if isinstance(kind, StorageKind) else half[0]
        for kind, half in zip(kinds, halves, strict=True)
    )
    return HybridStorage(row, column, shape=shape, dtype=dtype)


def _storage(
    kind: StorageKind, shape: tuple[int, ...], dtype: torch.dtype, tensors: Sequence[torch.Tensor | None]
) -> QuantizedStorage:
    buffers = tuple(tensors)
    device = next(tensor.device for tensor in buffers if tensor is not None)
    return QuantizedStorage.of_kind(kind, shape, dtype, device, buffers)
