"""Rows beyond those of a generation step, where FP8 products take multiples only.

The rows added are copies of the last one. Zeros would do for a product alone, but a norm or a bias in front of it turns
them into numbers that amax would see; a copy changes no amax, no scale and no other row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.shape_rule import row_multiple
from te_hal.quantization.autocast import current_frame

if TYPE_CHECKING:
    from te_hal.modules.fp8_module import Fp8Module


def in_padded_rows(
    layer: Fp8Module,
    input: torch.Tensor,
    **arguments: Any,  # noqa: ANN401 - the layer's
) -> Any:  # noqa: ANN401 - as the layer returns
    """What a layer gives for ``[..., K]``; under FP8 with as many rows as it takes, cut off again.

    Args:
        layer: Linear, LayerNormLinear or LayerNormMLP.
        input: plain.
        arguments: of its forward besides.

    Returns:
        As the layer returns it: outputs ``[..., N]``, biases as they are.
    """
    rows = math.prod(input.shape[:-1])
    frame = current_frame()
    formats = layer.formats(frame, input.device) if frame.enabled else None
    missing = 0 if formats is None else -rows % row_multiple(formats)
    if not (missing and rows):
        return layer(input, **arguments)
    flat = input.reshape(rows, input.shape[-1])
    found = layer(torch.cat((flat, flat[-1:].expand(missing, -1))), **arguments)
    results = found if isinstance(found, tuple) else (found,)
    cut = tuple(
        tensor[:rows].view(*input.shape[:-1], tensor.shape[-1]) if tensor.dim() > 1 else tensor for tensor in results
    )
    return cut if isinstance(found, tuple) else cut[0]
