"""amax, compute_scale and update_delayed_scale through a kernel library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, check_writable, contiguous, scratch
from te_hal.schema.formats import FLOAT32_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.ffi.native import Native

_OP_AMAX = codes.OPS["amax"]


def amax(native: Native, input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """te_hal.ops.amax."""
    values = contiguous(input)
    flags = 0
    if out is None:
        out = native.empty((1,), torch.float32, values.device)
    else:
        check_writable(native, "amax", "out", out)
        flags = codes.FLAG_ACCUMULATE
    count, dtype = values.numel(), codes.DTYPES[values.dtype]
    workspace = native.workspace(values.device, _OP_AMAX, rows=count, cols=1, input_dtype=dtype)
    status = native.lib.api_amax(
        native.library.api,
        address(values),
        dtype,
        count,
        out.data_ptr(),
        flags,
        *scratch(workspace),
        native.stream(values.device),
    )
    if status:
        native.check(status, "amax")
    return out


def compute_scale(
    native: Native,
    amax: torch.Tensor,
    *,
    fp8_max: float,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    value_for_inf: float = FLOAT32_MAX,
) -> torch.Tensor:
    """te_hal.ops.compute_scale."""
    amax = contiguous(amax)
    scale = native.empty(amax.shape, torch.float32, amax.device)
    status = native.lib.api_compute_scale(
        native.library.api,
        address(amax),
        address(scale),
        0,
        amax.numel(),
        fp8_max,
        epsilon,
        value_for_inf,
        codes.FLAG_POWER_OF_2 if power_of_2 else 0,
        native.stream(amax.device),
    )
    if status:
        native.check(status, "compute_scale")
    return scale


def update_delayed_scale(
    native: Native,
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    *,
    reduced_amax: torch.Tensor | None = None,
    fp8_max: float,
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> None:
    """te_hal.ops.update_delayed_scale. ``reduced_amax`` may be any part of ``amax_history``."""
    for name, tensor in (("amax_history", amax_history), ("scale", scale)):
        check_writable(native, "update_delayed_scale", name, tensor)
    history, scales = contiguous(amax_history), contiguous(scale)
    reduced = _apart(reduced_amax, amax_history)  # held by name: a copy must live until the call has ended
    length, count = history.shape
    status = native.lib.api_update_delayed_scale(
        native.library.api,
        address(history),
        address(scales),
        address(reduced),
        length,
        count,
        fp8_max,
        margin,
        codes.AMAX_ALGOS[amax_compute_algo],
        native.stream(history.device),
    )
    if status:
        native.check(status, "update_delayed_scale")
    if history is not amax_history:
        amax_history.copy_(history)
    if scales is not scale:
        scale.copy_(scales)


def update_delayed_scales(
    native: Native,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    *,
    reduced_amaxes: Sequence[torch.Tensor] | None = None,
    fp8_maxima: Sequence[float],
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> None:
    """te_hal.ops.update_delayed_scales: a launch for a few dozen histories."""
    for name, tensors in (("amax_histories", amax_histories), ("scales", scales)):
        for tensor in tensors:
            if tensor.requires_grad:
                check_writable(native, "update_delayed_scales", name, tensor)
    histories, factors = list(map(contiguous, amax_histories)), list(map(contiguous, scales))
    reduced = list(map(_apart, reduced_amaxes or (), amax_histories))
    shapes = [history.shape for history in histories]
    status = native.lib.api_update_delayed_scales(
        native.library.api,
        len(histories),
        list(map(address, histories)),
        list(map(address, factors)),
        list(map(address, reduced)) if reduced else native.ffi.NULL,
        [shape[0] for shape in shapes],
        [shape[1] for shape in shapes],
        fp8_maxima,
        margin,
        codes.AMAX_ALGOS[amax_compute_algo],
        native.stream(histories[0].device),
    )
    if status:
        native.check(status, "update_delayed_scales")
    for given, filled in zip((*amax_histories, *scales), (*histories, *factors), strict=True):
        if filled is not given:
            given.copy_(filled)


def _apart(reduced: torch.Tensor | None, history: torch.Tensor) -> torch.Tensor | None:
    """``reduced`` as it may lie: on row 0 of the history, or where nothing is written."""
    if reduced is None:
        return None
    reduced = contiguous(reduced)
    shared = reduced.untyped_storage().data_ptr() == history.untyped_storage().data_ptr()
    return reduced.clone() if shared and reduced.data_ptr() != history.data_ptr() else reduced
