"""What kind of storage the flags of a cast name."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from te_hal.schema.formats import ColumnwiseOrder, ScalingMode, code_format
from te_hal.schema.storage_kind import StorageKind

if TYPE_CHECKING:
    import torch


@functools.cache
def kind_of(
    dtype: torch.dtype, mode: ScalingMode, rowwise: bool, columnwise: bool, order: ColumnwiseOrder
) -> StorageKind:
    """The kind that an op's flags name, as words or as members of their enums."""
    fmt, mode, order = code_format(dtype), ScalingMode(mode), ColumnwiseOrder(order)
    return StorageKind.of(fmt, mode, rowwise=rowwise, columnwise=columnwise, order=order)
