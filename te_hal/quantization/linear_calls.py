"""The op calls of a linear layer: which copies its gemms read, and the casts and gemms that follow from that.

One source for those who run them (a module's plan resolves each call) and for those who only ask (autocast, whether
a backend has a recipe).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.quantization.operand_formats import READERS
from te_hal.schema.formats import ScalingMode
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from te_hal.dispatch import GemmCopies
    from te_hal.quantization.operand_formats import Formats, OperandFormat
    from te_hal.schema.formats import ColumnwiseOrder, ElementFormat
    from te_hal.schema.storage import StorageKind
    from te_hal.schema.support import Kind


class Copies(NamedTuple):
    """Which copies of a quantized operand."""

    rowwise: bool
    columnwise: bool


NO_COPIES = Copies(rowwise=False, columnwise=False)
ROWWISE = Copies(rowwise=True, columnwise=False)


class HybridCopies(NamedTuple):
    """Copies that the parts of an operand are made with (NO_COPIES of a plain one); None for one that nobody reads."""

    rowwise: Copies | None
    columnwise: Copies | None


class LinearCopies(NamedTuple):
    """Copies of the operands.

    Attributes:
        input_made, weight_made: made in the forward: what fprop and the backward read.
        input_kept, weight_kept: kept for the backward; none where no gradient asks for them.
        input_remade: made in the backward, where it is the original input that is kept.
        grad_made: of grad_output.
        hybrids: by role, of operands that become two parts, which have no other copies; as "input_again" of an input
            that is remade.
    """

    input_made: Copies = NO_COPIES
    weight_made: Copies = NO_COPIES
    input_kept: Copies = NO_COPIES
    weight_kept: Copies = NO_COPIES
    input_remade: Copies = NO_COPIES
    grad_made: Copies = NO_COPIES
    hybrids: tuple[tuple[str, HybridCopies], ...] = ()

    def hybrid(self, role: str) -> HybridCopies | None:
        """Copies of the two parts of an operand that has two."""
        return next((copies for name, copies in self.hybrids if name == role), None) if self.hybrids else None


def linear_copies(
    gemm_copies: Callable[[str, ElementFormat, ScalingMode], GemmCopies],
    formats: Formats,
    *,
    dgrad: bool,
    wgrad: bool,
    keeps_original_input: bool = False,
) -> LinearCopies:
    """Which copies of which operand the layer makes and keeps, as the backend answers per layout.

    Each operand is asked about by its own format and mode; one that is not quantized has no copies.

    Args:
        gemm_copies: the backend's answer.
        formats: of the operands.
        dgrad: the input needs a gradient.
        wgrad: the weight needs a gradient.
        keeps_original_input: the backward quantizes the input again.
    """

    def read(layout: str, operand: str, role: str, *, wanted: bool = True) -> list[str]:
        of = None if formats.hybrid(role) is not None else formats.read_by(layout, role)
        if of is None or not wanted:
            return []
        return [getattr(gemm_copies(layout, of.format, of.mode), operand)]

    of_fprop = read("fprop", "a", "input"), read("fprop", "b", "weight")
    input_read, weight_read = read("wgrad", "b", "input", wanted=wgrad), read("dgrad", "b", "weight", wanted=dgrad)
    if formats.backward_override == "dequantized":
        input_read, weight_read = of_fprop[0] if wgrad else [], of_fprop[1] if dgrad else []
    input_kept = [] if keeps_original_input else input_read
    of_grad = [*read("dgrad", "a", "grad_output", wanted=dgrad), *read("wgrad", "a", "grad_output", wanted=wgrad)]
    wanted = {"fprop": True, "dgrad": dgrad, "wgrad": wgrad}
    return LinearCopies(
        input_made=_union([*of_fprop[0], *input_kept]),
        weight_made=_union([*of_fprop[1], *weight_read]),
        input_kept=_union(input_kept),
        weight_kept=_union(weight_read),
        input_remade=_union(input_read if keeps_original_input else []),
        grad_made=_union(of_grad),
        hybrids=tuple(_hybrid_copies(gemm_copies, formats, wanted, again=keeps_original_input)),
    )


def _hybrid_copies(
    gemm_copies: Callable[[str, ElementFormat, ScalingMode], GemmCopies],
    formats: Formats,
    wanted: Mapping[str, bool],
    *,
    again: bool,
) -> Iterator[tuple[str, HybridCopies]]:
    for role, _ in formats.hybrids:
        found: list[Copies | None] = []
        for layout, operand in READERS[role]:
            of, copies = formats.read_by(layout, role), NO_COPIES
            if of is not None:
                copies = _union([getattr(gemm_copies(layout, of.format, of.mode), operand)])
            found.append(copies if wanted[layout] else None)
        made = HybridCopies(found[0], found[1])
        if role == "input" and again:
            yield "input_again", made._replace(rowwise=None)
            made = made._replace(columnwise=None)
        yield role, made


def _union(names: Iterable[str]) -> Copies:
    wanted = set(names)
    return Copies(rowwise="rowwise" in wanted, columnwise="columnwise" in wanted)


def operand_kind(of: OperandFormat | None, copies: Copies, order: ColumnwiseOrder, plain: Kind) -> Kind:
    """What an operand is to a capability answer: quantized with these copies, or ``plain`` where it has no format."""
    return plain if of is None else of.kind(copies, order)


def cast_flags(made: StorageKind) -> dict[str, object]:
    """The keyed flags of an op that casts, for what it makes; without the mode, which quantize_current lacks."""
    return {
        "dtype": made.format.dtype,
        "rowwise": made.rowwise,
        "columnwise": made.columnwise,
        "columnwise_order": made.order,
    }


def cast_call(device: torch.device, dtype: torch.dtype, made: StorageKind, *, delayed: bool) -> Call:
    """The call that quantizes one operand.

    Args:
        device: of the operand.
        dtype: of what is quantized.
        made: what it becomes.
        delayed: the scale is given and amax is recorded on the way; else the operand's own amax gives the scale.

    Returns:
        Of quantize, or quantize_current.
    """
    if not delayed and made.mode is ScalingMode.TENSOR:
        return Call("quantize_current", device, {"input": dtype, "out": None}, cast_flags(made))
    scale = torch.float32 if delayed else None
    kinds: dict[str, Kind] = {"input": dtype, "scale": scale, "amax": scale, "out": None}
    return Call("quantize", device, kinds, {**cast_flags(made), "mode": made.mode})


def fused_call(
    op: str, device: torch.device, kinds: dict[str, Kind], made: StorageKind, *, delayed: bool, **flags: object
) -> Call:
    """The call of a fused op that casts its result.

    Args:
        op: e.g. ``"layernorm_quantize"``.
        device: of the operands.
        kinds: of the op's own operands; scale and amax come on top.
        made: what the result becomes.
        delayed: as in :func:`cast_call`.
        flags: keyed flags of the op's own.
    """
    scale = torch.float32 if delayed else None
    own_scale = {**kinds, "scale": scale, "amax": scale}
    return Call(op, device, own_scale, {**cast_flags(made), "mode": made.mode, **flags})


def dequantize_call(
    device: torch.device, of: OperandFormat, copies: Copies, order: ColumnwiseOrder, dtype: torch.dtype
) -> Call:
    """The call that makes a plain tensor in ``dtype`` of an operand with these copies."""
    return Call("dequantize", device, {"input": of.kind(copies, order)}, {"out_dtype": dtype})


def gemm_call(
    layout: str,
    device: torch.device,
    a: Kind,
    b: Kind,
    out_dtype: torch.dtype | None,
    *,
    bias: torch.dtype | None = None,
    out: torch.dtype | None = None,
    accumulate: bool = False,
) -> Call:
    """The call of one product; the arguments as te_hal.ops.gemm has them, operands by what they are."""
    flags = {"layout": layout, "accumulate": accumulate, "out_dtype": out_dtype}
    return Call("gemm", device, {"a": a, "b": b, "bias": bias, "out": out}, flags)
