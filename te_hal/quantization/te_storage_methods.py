"""What Transformer Engine's storage classes share: methods, and which tensors count as their instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.quantization.hybrid_storage import values_of
from te_hal.quantization.te_names import TeNames
from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from te_hal.quantization.quantizer import Quantizer


class TensorsToo(type):
    """Metaclass: a tensor over a storage of the class's scaling modes counts as an instance.

    Where there are none, any quantized tensor does, and an instance of any class of this metaclass.
    """

    modes: frozenset[Any]

    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        if not isinstance(instance, torch.Tensor):
            return not cls.modes and type(type(instance)) is TensorsToo
        storage = getattr(instance, "quantized_storage", None)
        return storage is not None and (not cls.modes or storage.mode in cls.modes)


class StorageMethods(TeNames):
    """What the storage classes share."""

    __slots__ = ()

    @property
    def quantized_storage(self) -> Any:  # noqa: ANN401 - this very storage
        """This storage: where a tensor is taken apart, it is what comes out."""
        return self

    def __repr__(self) -> str:
        held = self._storage
        return f"{type(self).__name__}({held.kind!r}, shape={held.shape}, dtype={held.dtype}, device={held.device})"

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain values, in ``dtype`` or the nominal dtype; without autograd."""
        return values_of(self, dtype)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The logical shape, or one of its sizes."""
        shape = torch.Size(self._storage.shape)
        return shape if dim is None else shape[dim]

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Any:  # noqa: ANN401
        """Quantize ``tensor`` into this storage, in place, with the quantizer that it was made by.

        Raises:
            StateError: there is none.
        """
        quantizer: Quantizer | None = self._quantizer  # type: ignore[attr-defined] # a slot of each class
        if quantizer is None:
            raise StateError(
                f"{type(self).__name__}.quantize_",
                got="a storage without a quantizer",
                accepted="one made by a quantizer, or built with quantizer=...",
                todo="quantize anew",
            )
        quantizer.update_quantized(tensor, self, noop_flag=noop_flag)  # type: ignore[arg-type] # a storage, see there
        return self
