"""IdentityStorage: what IdentityQuantizer makes of a tensor: the tensor, where other quantizers make codes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.schema.formats import ColumnwiseOrder

if TYPE_CHECKING:
    from collections.abc import Sequence


class IdentityMode(enum.Enum):
    """Stands where other storages have their scaling mode."""

    IDENTITY = "identity"


class IdentityKind(NamedTuple):
    """What an IdentityStorage is, without the data; there is one, :data:`KIND`. One buffer serves both directions."""

    rowwise: bool = True
    columnwise: bool = True

    def __repr__(self) -> str:
        return "identity"


KIND = IdentityKind()


class IdentityStorage:
    """A tensor in high precision, for QuantizedTensor in the place of a QuantizedStorage.

    Args:
        data: the values, in the nominal dtype; shared, not copied.
    """

    __slots__ = ("data", "device", "dtype", "shape")

    mode = IdentityMode.IDENTITY
    kind = KIND
    format = None
    columnwise_order = ColumnwiseOrder.SAME  # the one buffer
    layout = torch.strided

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.shape, self.dtype, self.device = tuple(data.shape), data.dtype, data.device

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """As four buffers, of which the first is the data."""
        return (self.data, None, None, None)

    def with_tensors(self, tensors: Sequence[torch.Tensor | None], dtype: torch.dtype | None = None) -> IdentityStorage:
        """Over another first buffer, cast where its dtype is not ``dtype`` (None: this one's nominal dtype)."""
        data = tensors[0]
        return IdentityStorage((self.data if data is None else data).to(dtype or self.dtype))

    def keep(self, *, rowwise: bool, columnwise: bool) -> IdentityStorage:
        """This very storage: one buffer serves both directions."""
        del rowwise, columnwise
        return self

    def view(self, shape: tuple[int, ...]) -> IdentityStorage:
        """Under another logical shape; shares, never copies. Errors are those of torch's view."""
        return IdentityStorage(self.data.view(shape))

    def dequantized(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values in ``dtype`` or the nominal dtype, a new tensor."""
        return self.data.to(dtype or self.dtype, copy=True)
