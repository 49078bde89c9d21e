"""Fp8Padding and Fp8Unpadding: the rows of each expert padded to what FP8 takes, and stripped of it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.arguments import check_size
from te_hal.modules.grouped_splits import checked_splits
from te_hal.modules.moe.checks import check_rows
from te_hal.modules.moe.row_functions import NOBODY, GatherRows
from te_hal.modules.recompute import recomputable
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization.alignment import get_align_size_for_quantization
from te_hal.quantization.autocast import current_frame
from te_hal.quantization.availability import get_default_recipe
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Padding(torch.nn.Module):
    """What both directions share: the multiple, and rows gathered one way or the other."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        kind = type(self).__name__
        self.num_gemms = check_size(f"{kind}: num_gemms", num_gemms)
        self.align_size = None if align_size is None else check_size(f"{kind}: align_size", align_size)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"

    def _sizes(self, inp: torch.Tensor, m_splits: Any, *, padded: bool) -> tuple[list[int], list[int]]:  # noqa: ANN401
        """Rows of each group without and with padding; ``padded`` says which of them ``inp`` has."""
        where = type(self).__name__
        rows = check_rows(where, inp).shape[0]
        # Unpadding is told of fewer rows than its input has, so the sum is looked at afterwards.
        sizes = list(checked_splits(where, m_splits, self.num_gemms, rows))
        multiple = self.align_size or alignment_in_force()
        larger = [-(-size // multiple) * multiple for size in sizes]
        wanted = sum(larger if padded else sizes)
        if wanted != rows:
            raise ArgumentError(
                f"{where}: m_splits",
                got=f"{sizes}: {wanted} rows{f' when padded to multiples of {multiple}' if padded else ''}",
                accepted=f"the {rows} rows of the input",
                todo="pass the sizes without padding that go with this input",
            )
        return sizes, larger

    def _moved(self, inp: torch.Tensor, sizes: list[int], larger: list[int], *, pads: bool) -> torch.Tensor:
        """Rows with padding from rows without, or the other way round."""
        where_rows_lie = _places(sizes, larger, inp.device)
        padding = torch.full((sum(larger),), NOBODY, dtype=torch.int64, device=inp.device)
        padding[where_rows_lie] = torch.arange(sum(sizes), device=inp.device)
        source, slots = (padding, where_rows_lie) if pads else (where_rows_lie, padding)
        moved: torch.Tensor = GatherRows.apply(inp, source, slots[:, None], type(self).__name__)  # type: ignore[no-untyped-call]
        return moved


class Fp8Padding(_Padding):
    """Pads the rows of each group with zeros to a multiple that FP8 takes.

    Args:
        num_gemms: number of groups.
        align_size: the multiple; None: what the recipe in force needs, at each call: 32 for MXFP8, 128 for NVFP4, a
            CustomRecipe's ``quantization_alignment``, else 16.

    Raises:
        ArgumentError: sizes that are no positive ints.
    """

    @run_eagerly
    @recomputable
    def forward(self, inp: torch.Tensor, m_splits: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Pad.

        Args:
            inp: ``[rows, hidden]``, plain or quantized as in moe_permute.
            m_splits: rows of each group; together all rows.

        Returns:
            The padded rows, ``inp`` itself where nothing is missing, and the padded sizes.

        Raises:
            ArgumentTypeError, ArgumentError: rows or sizes that do not fit.
        """
        sizes, larger = self._sizes(inp, m_splits, padded=False)
        return (inp if sizes == larger else self._moved(inp, sizes, larger, pads=True)), larger


class Fp8Unpadding(_Padding):
    """Strips what :class:`Fp8Padding` has added; arguments as there."""

    @run_eagerly
    @recomputable
    def forward(self, inp: torch.Tensor, m_splits: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Strip.

        Args:
            inp: ``[padded rows, hidden]``.
            m_splits: rows of each group without padding, as Fp8Padding got them.

        Returns:
            ``[rows, hidden]``; ``inp`` itself where there is no padding.

        Raises:
            ArgumentTypeError, ArgumentError: rows or sizes that do not fit.
        """
        sizes, larger = self._sizes(inp, m_splits, padded=True)
        return inp if sizes == larger else self._moved(inp, sizes, larger, pads=False)


def alignment_in_force() -> int:
    """The multiple for the recipe in force; outside of any autocast for the default recipe."""
    return get_align_size_for_quantization(current_frame().recipe or get_default_recipe())


def _places(sizes: list[int], larger: list[int], device: torch.device) -> torch.Tensor:
    """Where the rows lie among the padded ones."""
    plain, padded = torch.tensor(sizes, device=device), torch.tensor(larger, device=device)
    shift = (padded.cumsum(0) - padded) - (plain.cumsum(0) - plain)
    return torch.arange(sum(sizes), device=device) + shift.repeat_interleave(plain)
