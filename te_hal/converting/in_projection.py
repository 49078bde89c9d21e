"""The product with some rows of the weight that torch's attention keeps for queries, keys and values together."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from te_hal.modules import Linear

if TYPE_CHECKING:
    import torch


class InProjection(Linear):
    """Linear without parameters: at each call it reads those of its holder, as they then are.

    Args:
        parts: which rows: letters of "qkv" that follow one another.
        size: rows of each part, and columns.
        bias: the holder has a bias.
        dtype: of the holder's parameters.
    """

    def __init__(self, parts: str, size: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(size, len(parts) * size, bias=bias, params_dtype=dtype, device="meta")
        first = "qkv".index(parts[0])
        self._rows = None if parts == "qkv" else slice(first * size, (first + len(parts)) * size)
        for name in (*self.weight_names, *self.bias_names):
            del self._parameters[name]  # torch has no other way to leave the name to an attribute

    def read_from(self, holder: torch.nn.Module) -> None:
        """Use ``in_proj_weight`` and ``in_proj_bias`` of ``holder``, which is not kept alive."""
        self._holder = weakref.ref(holder)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as torch's
        if name in ("weight", "bias") and "_holder" in vars(self):
            whole = getattr(self._holder(), f"in_proj_{name}")
            return whole if self._rows is None else whole[self._rows]
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        """Without the holder: a copy is read from the copy of the holder."""
        return {name: value for name, value in vars(self).items() if name != "_holder"}
