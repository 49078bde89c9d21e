"""WeightCache: quantized weights kept between the microbatches of one step (``is_first_microbatch``)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_hal.quantization.hybrid_storage import HybridStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.modules.plan import LinearPlan
    from te_hal.schema.storage import QuantizedStorage

    Quantized = QuantizedStorage | HybridStorage
    Version = tuple[weakref.ref[torch.Tensor], tuple[int, int]]


@dataclass(frozen=True)
class _Origin:
    """What a kept weight was made from and by; it is used again only while both are the same."""

    memo: object
    versions: tuple[Version, ...]


class WeightCache:
    """Quantized weights by name, each valid for the parameters and the choice of backend it was made from.

    A kept weight whose parameter was written to or replaced since (by an optimizer, by loading) is not given out.
    Writing into ``parameter.data`` leaves no trace in torch (assigning other memory to it does); pass
    ``is_first_microbatch=True`` or clear after it.

    Attributes:
        storages: what is kept.
    """

    def __init__(self) -> None:
        self.storages: dict[str, Quantized] = {}
        self._origins: dict[str, _Origin] = {}

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        """A copied or pickled module quantizes its weights anew."""
        return WeightCache, ()

    def put(self, name: str, storage: Quantized, parameters: Sequence[torch.Tensor], plan: LinearPlan) -> None:
        """Keep a quantized weight."""
        self.storages[name] = storage
        self._origins[name] = _Origin(plan.memo, tuple((weakref.ref(p), _version(p)) for p in parameters))

    def get(self, name: str, parameters: Sequence[torch.Tensor], plan: LinearPlan) -> Quantized | None:
        """The kept weight with the copies that ``plan`` makes; None if there is none that fits."""
        storage, origin = self.storages.get(name), self._origins.get(name)
        if storage is None or origin is None or origin.memo is not plan.memo:
            return None
        if len(parameters) != len(origin.versions) or not all(
            of() is parameter and version == _version(parameter)
            for parameter, (of, version) in zip(parameters, origin.versions, strict=True)
        ):
            return None
        if storage.dtype != plan.key.dtype or storage.device != plan.key.device or not _saveable(storage):
            return None
        if isinstance(storage, HybridStorage):
            parts = plan.copies.hybrid("weight")
            return None if parts is None else storage.read_by(parts, plan.order)
        made = plan.copies.weight_made
        if (made.rowwise and not storage.kind.rowwise) or (made.columnwise and not storage.kind.columnwise):
            return None
        return storage.keep(rowwise=made.rowwise, columnwise=made.columnwise)

    def clear(self) -> None:
        """Forget everything."""
        self.storages.clear()
        self._origins.clear()


def _version(parameter: torch.Tensor) -> tuple[int, int]:
    """How often it was written to in place (which tensors made in inference mode don't count), and its address."""
    writes = 0 if parameter.is_inference() else parameter._version  # noqa: SLF001 - autograd's own, no public name
    return writes, parameter.data_ptr()


def _saveable(storage: Quantized) -> bool:
    """Whether it can serve now: what inference mode made cannot be saved for a backward."""
    return torch.is_inference_mode_enabled() or not any(t is not None and t.is_inference() for t in storage.tensors())
