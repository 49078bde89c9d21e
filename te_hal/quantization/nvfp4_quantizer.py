"""NVFP4Quantizer: 4-bit codes, scales of blocks under one of the tensor, all from the tensor at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.quantization.amax_reduction import check_group, check_single_process
from te_hal.quantization.block_quantizers import BlockQuantizer
from te_hal.quantization.quantizer_arguments import wrong
from te_hal.schema.block_scales import rows_and_cols
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.flags import check_flags
from te_hal.schema.formats import E2M1, DType, ScalingMode
from te_hal.schema.nvfp4_layout import BLOCK
from te_hal.schema.refusals import declare

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

#: Arguments of Transformer Engine's that take one value here, and why.
_FIXED = declare(
    "NVFP4Quantizer",
    {
        "row_scaled_nvfp4": False,
        "nvfp4_use_4over6": False,
        "nvfp4_e4m3_max": 448,
        "nvfp4_4over6_err_mode": "MAE",
        "with_random_sign_mask": True,
    },
    {
        "row_scaled_nvfp4": "no op has a scale per row",
        "nvfp4_use_4over6": "no op chooses between two scales per block, which 4-over-6 is",
        "nvfp4_e4m3_max": "448 is the largest of E4M3; another bound is part of 4-over-6, which no op has",
        "nvfp4_4over6_err_mode": "it is part of 4-over-6, a choice between two scales per block that no op makes",
        "with_random_sign_mask": "the transform has one set of signs",
    },
)


class NVFP4Quantizer(BlockQuantizer):
    """NVFP4 (docs/numerics.md, NV1 to NV6). Keeps no state; both sizes of a tensor are multiples of 16.

    With ``stochastic_rounding`` each quantization draws a seed from torch's default CPU generator, which
    ``torch.manual_seed`` sets.

    Args:
        fp4_dtype: ``te.DType.kFloat4E2M1``.
        rowwise, columnwise: which copies to make.
        with_amax_reduction, amax_reduction_group: take amax over these processes, None: over all. Several are
            refused for now.
        with_rht: the columnwise copy is of Hadamard-transformed values; tensors are bf16 then. It only goes into
            products with another such copy.
        with_post_rht_amax: the columnwise amax is that of the transformed values; goes with ``with_rht``, always.
        with_2d_quantization: a scale per 16x16 square; excludes ``with_rht`` and ``stochastic_rounding``.
        stochastic_rounding: round up or down by chance, without bias.
        row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max, nvfp4_4over6_err_mode: anything but these defaults is
            refused.
        with_random_sign_mask: of the Hadamard transform; False is refused with ``with_rht`` and says nothing without.

    Raises:
        ArgumentError: another dtype, a flag that is no bool, flags that exclude each other.
        UnsupportedError: what is refused above.
    """

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: ProcessGroup | None = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        if fp4_dtype not in (DType.kFloat4E2M1, E2M1):
            raise wrong("NVFP4Quantizer: fp4_dtype", fp4_dtype, "te.DType.kFloat4E2M1")
        _refuse_others(
            row_scaled_nvfp4=row_scaled_nvfp4,
            nvfp4_use_4over6=nvfp4_use_4over6,
            nvfp4_e4m3_max=nvfp4_e4m3_max,
            nvfp4_4over6_err_mode=nvfp4_4over6_err_mode,
            with_random_sign_mask=with_random_sign_mask if with_rht else True,
        )
        check_group("NVFP4Quantizer: amax_reduction_group", amax_reduction_group)
        if with_amax_reduction:
            check_single_process("NVFP4Quantizer: with_amax_reduction", amax_reduction_group)
        flags = {
            "with_rht": with_rht,
            "with_random_sign_mask": with_random_sign_mask,
            "with_post_rht_amax": with_post_rht_amax,
            "with_2d_quantization": with_2d_quantization,
            "stochastic_rounding": stochastic_rounding,
        }
        check_flags("NVFP4Quantizer", flags)
        if with_rht is not with_post_rht_amax:
            accepted = f"{with_rht}, as with_rht: amax is of what is cast"
            raise wrong("NVFP4Quantizer: with_post_rht_amax", with_post_rht_amax, accepted)
        if with_2d_quantization and (with_rht or stochastic_rounding):
            accepted = "it alone: both copies hold the same codes"
            raise wrong("NVFP4Quantizer: with_2d_quantization", value=True, accepted=accepted)
        mode = ScalingMode.NVFP4_HADAMARD if with_rht else ScalingMode.NVFP4
        mode = ScalingMode.NVFP4_16X16 if with_2d_quantization else mode
        super().__init__(E2M1, mode, rowwise=rowwise, columnwise=columnwise)
        self.stochastic_rounding = stochastic_rounding

    @property
    def with_rht(self) -> bool:
        """Whether the columnwise copy is of Hadamard-transformed values."""
        return self.mode is ScalingMode.NVFP4_HADAMARD

    @property
    def with_2d_quantization(self) -> bool:
        """Whether 16x16 squares share a scale."""
        return self.mode is ScalingMode.NVFP4_16X16

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool = False) -> tuple[int, ...]:
        """Shape of the scales of a tensor of this shape, as NVFP4Tensor shows them: padded to multiples of (128, 4)."""
        rows, cols = rows_and_cols(tuple(shape))
        outer, summed = (cols, rows) if columnwise else (rows, cols)
        return -(-outer // 128) * 128, -(-summed // (4 * BLOCK)) * 4

    def settings(self) -> dict[str, Any]:
        """What else the cast takes: a new seed for each, where it rounds stochastically."""
        return {"rounding_seed": _new_seed()} if self.stochastic_rounding else {}


def _new_seed() -> int:
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))


def _refuse_others(**given: object) -> None:
    for name, value in given.items():
        taken, reason = _FIXED[name]
        if type(value) is not type(taken) or value != taken:
            raise UnsupportedError(
                f"NVFP4Quantizer: {name}", got=repr(value), accepted=f"{taken!r}: {reason}", todo="leave it out"
            )
