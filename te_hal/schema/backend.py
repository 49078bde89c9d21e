"""Backend: what an implementation hands over to join, as one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from te_hal.schema.block_scales import SQUARE_MODES
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.support import SUPPORTED

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from te_hal.schema.formats import ElementFormat
    from te_hal.schema.support import Call, Support

#: In ``Backend.serves``: tensors on any device.
ANY_DEVICE = "*"


@dataclass(frozen=True)
class GemmCopies:
    """Which copy of each quantized operand a gemm reads."""

    a: Literal["rowwise", "columnwise"]
    b: Literal["rowwise", "columnwise"]


def reads_rowwise(layout: str, format: ElementFormat, mode: ScalingMode) -> GemmCopies:  # noqa: ARG001 - the answer's signature
    """The answer of a gemm that serves all three layouts from the rowwise copies."""
    return GemmCopies("rowwise", "rowwise")


#: Which copy of each operand has its blocks along the sum of a product (docs/numerics.md, B5).
ALONG_THE_SUM = {
    "fprop": GemmCopies("rowwise", "rowwise"),
    "dgrad": GemmCopies("rowwise", "columnwise"),
    "wgrad": GemmCopies("columnwise", "columnwise"),
}


def reads_blocks_along_the_sum(layout: str, format: ElementFormat, mode: ScalingMode) -> GemmCopies:
    """The answer of a gemm that reads any memory order: rowwise copies where the others hold the same, else B5."""
    if mode is ScalingMode.TENSOR or mode in SQUARE_MODES:
        return reads_rowwise(layout, format, mode)
    return ALONG_THE_SUM[layout]


def always_usable() -> Support:
    """The answer of a backend that needs no hardware and no library."""
    return SUPPORTED


class Allocator(Protocol):
    """What makes the memory of a backend's results, where that is not torch.empty.

    Attributes:
        empty: makes a contiguous tensor from shape, dtype and device. Kernels read the attribute at every call, so
            that the conformance kit can put watched memory in its place.
    """

    empty: Callable[[Any, torch.dtype, Any], torch.Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend:
    """An implementation of the op interface.

    Attributes:
        name: what users write; equal to the name of the entry point.
        kernels: op name to a function with the signature of that op's schema. Ops left out are refused, or
            composed of others where they are optional.
        serves: device types it can take, torch's names (``"cpu"``), or ``{ANY_DEVICE}``.
        supports: answers for a call whose op has a kernel, before it is launched. Must say no to everything the
            kernel cannot do, touches no data, and raises nothing: what is missing on this machine is a no as well.
        default_for: device types it claims unasked; empty for an emulator or any other substitute.
        usable: whether it works on this machine, with the reason if not. Asked when the backend is selected or
            listed, never at registration; may be slow.
        gemm_copies: which copies of quantized operands its gemm reads, by layout, format and scaling mode.
        columnwise_order: memory order of the columnwise copies that it makes and reads.
        sdpa_kernels: which kernels torch's scaled_dot_product_attention shall try on its devices, names of
            torch.nn.attention.SDPBackend, most wanted first; empty: torch's own order.
        allocator: what makes the memory of its results; None: torch's public functions.
        description: one line for ``list_backends``.
    """

    name: str
    kernels: Mapping[str, Callable[..., Any]]
    serves: frozenset[str]
    supports: Callable[[Call], Support]
    default_for: frozenset[str] = frozenset()
    usable: Callable[[], Support] = always_usable
    gemm_copies: Callable[[str, ElementFormat, ScalingMode], GemmCopies] = reads_rowwise
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED
    sdpa_kernels: tuple[str, ...] = ()
    allocator: Allocator | None = None
    description: str = ""

    def __post_init__(self) -> None:
        # What registration has checked must stay what it was.
        if isinstance(self.kernels, Mapping):
            object.__setattr__(self, "kernels", MappingProxyType(dict(self.kernels)))

    def takes(self, device_type: str) -> bool:
        """Whether it serves tensors on a device of this type."""
        return device_type in self.serves or ANY_DEVICE in self.serves

    def __repr__(self) -> str:
        return f"Backend({self.name!r})"
