"""GroupedLinear as an op: its rows per group come as an extra input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules import grouped_linear
from te_hal.modules.activation_dtype import activation_dtype
from te_hal.modules.ops.basic_linear import KAIMING
from te_hal.modules.ops.input_checks import check_beside, check_input
from te_hal.modules.ops.operation import BasicOperation
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class GroupedLinear(grouped_linear.GroupedLinear, BasicOperation):
    """A linear layer for each group of consecutive rows; weights start as torch.nn.Linear's do, biases at 0.

    It runs by itself in a Sequential.

    Args:
        num_groups: number of groups.
        in_features, out_features, device, single_grouped_weight, single_grouped_bias, delay_wgrad_compute: as
            te.GroupedLinear.
        bias: have biases.
        dtype: of the parameters; None: torch's default dtype.
        rng_state_tracker_function: gives the RNG tracker under whose fork weights are initialised; None: none.
        accumulate_into_main_grad: put weight gradients into ``main_grad`` (see te_hal.modules.main_grad).
        scale_bias: the bias of a row is multiplied by the row's number, which comes as a second extra input.

    Raises:
        As te.GroupedLinear; ArgumentError: ``scale_bias`` without ``bias``.
    """

    num_extra_inputs = 1

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        check_flags("GroupedLinear", {"scale_bias": scale_bias, "bias": bias})
        if scale_bias and not bias:
            raise ArgumentError(
                "GroupedLinear: scale_bias", got="True with bias=False", accepted="bias=True", todo="leave it out"
            )
        super().__init__(
            num_groups,
            in_features,
            out_features,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            get_rng_state_tracker=rng_state_tracker_function,
            init_method=KAIMING,
            bias=bias,
            return_bias=scale_bias,
            params_dtype=dtype,
            device=device,
            delay_wgrad_compute=delay_wgrad_compute,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
        )
        self.num_groups, self.scale_bias = num_groups, scale_bias
        self.num_extra_inputs = 2 if scale_bias else 1

    def forward(  # type: ignore[override] # other arguments than the module's
        self, input: torch.Tensor, split_sizes: Sequence[int] | torch.Tensor, bias_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply to each group of rows its layer.

        Args:
            input: ``[..., in_features]``.
            split_sizes: rows of each group, ``[num_groups]``.
            bias_scale: with ``scale_bias``, a number for each row, ``[...]``.

        Returns:
            ``[..., out_features]`` in the activation dtype.

        Raises:
            ArgumentError: a ``bias_scale`` that does not fit, or without ``scale_bias``.
            TeHalError: as te.GroupedLinear.
        """
        if bias_scale is not None and not self.scale_bias:
            raise ArgumentError(
                f"{self.label}: bias_scale",
                got="a value with scale_bias=False",
                accepted="None: nothing would read it",
                todo="leave it out, or make the op with scale_bias=True",
            )
        if not self.scale_bias:
            output: torch.Tensor = super().forward(input, split_sizes)
            return output
        bias_scale = self._checked_scale(input, bias_scale)
        output, biases = super().forward(input, split_sizes)
        stacked = biases if isinstance(biases, torch.Tensor) else torch.stack(list(biases))
        # Rows of no group are one more group, whose bias is 0.
        stacked = torch.nn.functional.pad(stacked, (0, 0, 0, 1))
        counts, total = torch.as_tensor(split_sizes, dtype=torch.int64, device=output.device), bias_scale.numel()
        counts = torch.cat([counts, total - counts.sum(dim=0, keepdim=True)])
        rows = torch.repeat_interleave(stacked, counts, dim=0, output_size=total)
        return output + rows.view(output.shape) * bias_scale.unsqueeze(-1)

    def _checked_scale(self, input: torch.Tensor, bias_scale: object) -> torch.Tensor:
        """Before the layer runs, which would change its scaling state."""
        check_input(self.label, input, self.in_features, "in_features")
        dtype = activation_dtype(self.label, input, weight=getattr(self, self.weight_names[0]))
        like = torch.empty(0, dtype=dtype, device=input.device)
        return check_beside(self.label, "bias_scale", bias_scale, like, tuple(input.shape[:-1]))
