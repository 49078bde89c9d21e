"""HybridQuantizedTensor: a tensor whose two directions are quantized differently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

from te_hal.quantization.hybrid_storage import HybridMode, HybridStorage
from te_hal.quantization.quantized_tensor import QuantizedTensor, wrap
from te_hal.quantization.quantizer_arguments import dropped_usages
from te_hal.quantization.te_part_storages import HybridQuantizedTensorStorage, named_part, named_storage
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    import torch


class HybridQuantizedTensor(QuantizedTensor):
    """What a HybridQuantizer gives: a :class:`QuantizedTensor` of two parts, each in a format of its own.

    Its values are those of the rowwise part where that is there. Neither part follows from the other; parts along a
    dimension are plain.
    """

    modes: ClassVar[frozenset[Any]] = frozenset({HybridMode.HYBRID})
    storage_class = HybridQuantizedTensorStorage

    @property
    def _rowwise_storage(self) -> Any:  # noqa: ANN401 - a storage of any class, or None
        return named_part(self._hybrid.rowwise)

    @property
    def _columnwise_storage(self) -> Any:  # noqa: ANN401
        return named_part(self._hybrid.columnwise)

    @property
    def rowwise_sub_storage(self) -> Any:  # noqa: ANN401
        """The rowwise part, a storage by Transformer Engine's names; None where there is none."""
        return self._rowwise_storage

    @property
    def columnwise_sub_storage(self) -> Any:  # noqa: ANN401
        """The columnwise part, likewise."""
        return self._columnwise_storage

    def _codes(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        codes: tuple[torch.Tensor | None, torch.Tensor | None] = named_storage(self._hybrid, None).get_data_tensors()
        return codes

    def get_metadata(self) -> dict[str, Any]:
        """What HybridQuantizedTensorStorage is made of, by the names of its constructor's arguments."""
        metadata: dict[str, Any] = named_storage(self._hybrid, self._quantizer).get_metadata()
        return metadata

    @property
    def _hybrid(self) -> HybridStorage:
        storage: Any = self.quantized_storage
        hybrid: HybridStorage = storage
        return hybrid

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a part in place.

        Raises:
            ArgumentError: an argument is no bool, or no part would be left.
            UnsupportedError: a part that is not there is asked for.
        """
        wanted = dropped_usages(type(self).__name__, self.get_usages(), rowwise_usage, columnwise_usage)
        self.quantized_storage = self._hybrid.keep(**wanted)  # type: ignore[assignment] # a storage of two parts

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Any, ...]:
        storage = self._hybrid
        parts = tuple(
            wrap(part) if isinstance(part, QuantizedStorage) else part for part in (storage.rowwise, storage.columnwise)
        )
        return rebuild_hybrid_tensor, (*parts, storage.shape, storage.dtype, self.requires_grad, self._attributes())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's stub hides the name
        facts = f"{self._hybrid.kind!r}, dtype={self.dtype}{', requires_grad=True' if self.requires_grad else ''}"
        shown = [f"{name}={part}" for name, part in zip(("rowwise", "columnwise"), self._shown(), strict=True)]
        return f"{type(self).__name__}({', '.join(shown)}, {facts})"

    def _shown(self) -> list[object]:
        parts = (self._hybrid.rowwise, self._hybrid.columnwise)
        return [wrap(part) if isinstance(part, QuantizedStorage) else part for part in parts]


def rebuild_hybrid_tensor(
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> HybridQuantizedTensor:
    """What a pickle calls: a tensor over these parts, without a quantizer."""
    row, column = (
        part.quantized_storage if isinstance(part, QuantizedTensor) else part for part in (rowwise, columnwise)
    )
    storage: Any = HybridStorage(row, column, shape=tuple(shape), dtype=dtype)
    made: HybridQuantizedTensor = HybridQuantizedTensor(storage, requires_grad=requires_grad)
    made.__dict__.update(attributes)
    return made
