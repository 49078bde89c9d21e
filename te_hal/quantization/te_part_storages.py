"""Transformer Engine's storage classes over IdentityStorage and HybridStorage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.quantization.hybrid_storage import HybridMode, HybridStorage
from te_hal.quantization.identity_storage import IdentityMode, IdentityStorage
from te_hal.quantization.quantizer_arguments import check_identity_usages, dropped_usages
from te_hal.quantization.te_storage_methods import StorageMethods, TensorsToo
from te_hal.quantization.te_storages import te_storage
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from te_hal.quantization.hybrid_storage import Part
    from te_hal.quantization.quantizer import Quantizer


class IdentityTensorStorage(StorageMethods, IdentityStorage, metaclass=TensorsToo):
    """Values in high precision, which serve both directions.

    Args:
        hp_data: the values; shared where they have the nominal dtype.
        fake_dtype: nominal dtype; None: that of the values.
        quantizer: for :meth:`quantize_`.

    Raises:
        ArgumentTypeError: no tensor.
    """

    __slots__ = ("_quantizer",)
    modes = frozenset({IdentityMode.IDENTITY})

    def __init__(
        self,
        *,
        hp_data: torch.Tensor | None,
        fake_dtype: torch.dtype | None = None,
        quantizer: Quantizer | None = None,
    ) -> None:
        if not isinstance(hp_data, torch.Tensor):
            where = "IdentityTensorStorage: hp_data"
            raise ArgumentTypeError(where, got=f"a {type(hp_data).__name__}", accepted="a tensor", todo="pass one")
        IdentityStorage.__init__(self, hp_data.detach().to(fake_dtype or hp_data.dtype))
        self._quantizer = quantizer

    @property
    def _hp_data(self) -> torch.Tensor:
        return self.data

    def _codes(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.data, None

    def view(self, *shape: Any) -> IdentityTensorStorage:  # noqa: ANN401 - a storage of any class
        """Under another logical shape; errors are those of torch's view."""
        return IdentityTensorStorage(hp_data=self.data.view(*shape), quantizer=self._quantizer)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Nothing to make or drop.

        Raises:
            ArgumentError: an argument is no bool, or both are False.
        """
        check_identity_usages(type(self).__name__, rowwise_usage, columnwise_usage)

    def get_metadata(self) -> dict[str, Any]:
        """Arguments of the constructor."""
        return {"hp_data": self.data, "quantizer": self._quantizer, "fake_dtype": self.dtype}


class HybridQuantizedTensorStorage(StorageMethods, HybridStorage, metaclass=TensorsToo):
    """Two parts, each in a format of its own.

    Args:
        rowwise_storage, columnwise_storage: storages of one tensor; either may be None, not both.
        rowwise_quantizer, columnwise_quantizer: of the parts; taken and kept by ``quantizer`` alone.
        quantizer: for :meth:`quantize_`.
        fake_dtype: nominal dtype.

    Raises:
        ArgumentError: no part, or two of different shapes or devices.
    """

    __slots__ = ("_quantizer",)
    modes = frozenset({HybridMode.HYBRID})

    def __init__(
        self,
        *,
        rowwise_storage: Any | None,  # noqa: ANN401 - a storage of any class
        columnwise_storage: Any | None,  # noqa: ANN401 - a storage of any class
        rowwise_quantizer: Quantizer | None = None,
        columnwise_quantizer: Quantizer | None = None,
        quantizer: Quantizer | None = None,
        fake_dtype: torch.dtype = torch.float32,
    ) -> None:
        del rowwise_quantizer, columnwise_quantizer
        whole = rowwise_storage if rowwise_storage is not None else columnwise_storage
        shape = () if whole is None else tuple(whole.shape)
        parts = [_part(each) for each in (rowwise_storage, columnwise_storage)]
        _check_parts(parts)
        HybridStorage.__init__(self, parts[0], parts[1], shape=shape, dtype=fake_dtype)
        self._quantizer = quantizer

    @property
    def _rowwise_storage(self) -> Any:  # noqa: ANN401 - a storage of any class
        return named_part(self.rowwise)

    @property
    def _columnwise_storage(self) -> Any:  # noqa: ANN401 - a storage of any class
        return named_part(self.columnwise)

    def _codes(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        row, column = self.tensors()[0], self.tensors()[4]
        named = self._columnwise_storage
        return row, column if named is None else named._codes()[1 if named.kind.columnwise else 0]  # noqa: SLF001

    def view(self, *shape: Any) -> Any:  # noqa: ANN401 - a storage of any class
        """Both parts under another logical shape, see HybridStorage.view."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return named_storage(HybridStorage.view(self, tuple(sizes)), self._quantizer)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a part in place.

        Raises:
            ArgumentError: an argument is no bool, or no part would be left.
            UnsupportedError: a part that is not there is asked for.
        """
        wanted = dropped_usages(type(self).__name__, self.get_usages(), rowwise_usage, columnwise_usage)
        kept = self.keep(**wanted)
        for name in HybridStorage.__slots__:
            setattr(self, name, getattr(kept, name))

    def get_metadata(self) -> dict[str, Any]:
        """Arguments of the constructor."""
        return {
            "rowwise_storage": self._rowwise_storage,
            "columnwise_storage": self._columnwise_storage,
            "rowwise_quantizer": getattr(self._quantizer, "rowwise_quantizer", None),
            "columnwise_quantizer": getattr(self._quantizer, "columnwise_quantizer", None),
            "quantizer": self._quantizer,
            "fake_dtype": self.dtype,
        }


def _part(given: Any) -> Any:  # noqa: ANN401 - a storage of any class, or a tensor
    held = getattr(given, "quantized_storage", given)
    return held.data if isinstance(held, IdentityStorage) else held


def _check_parts(parts: list[Any]) -> None:
    row, column = parts
    if row is None or column is None:
        return
    if (tuple(row.shape), row.device) != (tuple(column.shape), column.device):
        raise ArgumentError(
            "HybridQuantizedTensorStorage: columnwise_storage",
            got=f"shape {tuple(column.shape)} on {column.device}",
            accepted=f"shape {tuple(row.shape)} on {row.device}, as of rowwise_storage",
            todo="pass the parts of one tensor",
        )


def named_part(part: Part | None) -> Any:  # noqa: ANN401 - a storage of any class
    """A part under Transformer Engine's names; None where it is not there."""
    if part is None:
        return None
    return IdentityTensorStorage(hp_data=part) if isinstance(part, torch.Tensor) else te_storage(part, None)


def named_storage(storage: Any, quantizer: Quantizer | None) -> Any:  # noqa: ANN401 - a storage of any class
    """The same buffers under Transformer Engine's names, in the class that goes with the storage."""
    if isinstance(storage, IdentityStorage):
        return IdentityTensorStorage(hp_data=storage.data, quantizer=quantizer)
    if isinstance(storage, HybridStorage):
        return HybridQuantizedTensorStorage(
            rowwise_storage=storage.rowwise,
            columnwise_storage=storage.columnwise,
            quantizer=quantizer,
            fake_dtype=storage.dtype,
        )
    return te_storage(storage, quantizer)
