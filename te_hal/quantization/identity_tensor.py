"""IdentityTensor: a tensor that an IdentityQuantizer left as it is, with the interface of quantized ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

from te_hal.quantization.identity_storage import IdentityMode, IdentityStorage
from te_hal.quantization.quantized_tensor import QuantizedTensor
from te_hal.quantization.quantizer_arguments import check_identity_usages
from te_hal.quantization.te_part_storages import IdentityTensorStorage

if TYPE_CHECKING:
    import torch


class IdentityTensor(QuantizedTensor):
    """What an IdentityQuantizer gives: a :class:`QuantizedTensor` whose values are held in high precision.

    One buffer serves both directions. Any view that torch has of it shares its values; parts along the first
    dimension take writes.
    """

    modes: ClassVar[frozenset[Any]] = frozenset({IdentityMode.IDENTITY})
    storage_class = IdentityTensorStorage

    @property
    def _hp_data(self) -> torch.Tensor:
        return self._identity.data

    def _codes(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._identity.data, None

    def get_metadata(self) -> dict[str, Any]:
        """What IdentityTensorStorage is made of, by the names of its constructor's arguments."""
        return {"hp_data": self._identity.data, "quantizer": self._quantizer, "fake_dtype": self.dtype}

    @property
    def _identity(self) -> IdentityStorage:
        storage: Any = self.quantized_storage
        held: IdentityStorage = storage
        return held

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Nothing to make or drop: one buffer serves both directions.

        Raises:
            ArgumentError: an argument is no bool, or both are False.
        """
        check_identity_usages(type(self).__name__, rowwise_usage, columnwise_usage)

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Any, ...]:
        return rebuild_identity_tensor, (self._identity.data, self.requires_grad, self._attributes())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's stub hides the name
        return f"{type(self).__name__}({self._identity.data}{', requires_grad=True' if self.requires_grad else ''})"


def rebuild_identity_tensor(data: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> IdentityTensor:
    """What a pickle calls: a tensor over this buffer, without a quantizer."""
    storage: Any = IdentityStorage(data)
    made: IdentityTensor = IdentityTensor(storage, requires_grad=requires_grad)
    made.__dict__.update(attributes)
    return made
