"""update_delayed_scales, an optional op of the amax family, and its composition."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import entry, register_composition
from te_hal.schema.amax import UPDATE_DELAYED_SCALES
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_enter_update_delayed_scales = entry(UPDATE_DELAYED_SCALES)


def update_delayed_scales(
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    *,
    reduced_amaxes: Sequence[torch.Tensor] | None = None,
    fp8_maxima: Sequence[float],
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> None:
    """update_delayed_scale of several histories, in few launches where the backend can (D1 to D4).

    Args:
        amax_histories: lists or tuples, here and below, of one tensor per group, all on one device: fp32 ``[L, N]``
            with an L and N of the group's own, written in place.
        scales: fp32 ``[N]``, written in place.
        reduced_amaxes: fp32 ``[N]``; of every group, or None.
        fp8_maxima: largest finite magnitude of each group's format, positive and within fp32's range.
        margin: scales are divided by ``2**margin``; from -100 to 100.
        amax_compute_algo: ``"max"`` over the history, or ``"most_recent"``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, with the group; nothing was changed.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_update_delayed_scales(amax_histories, scales, reduced_amaxes, fp8_maxima, margin, amax_compute_algo)
    kernel(
        amax_histories,
        scales,
        reduced_amaxes=reduced_amaxes,
        fp8_maxima=fp8_maxima,
        margin=margin,
        amax_compute_algo=amax_compute_algo,
    )


def _compose(
    parts: Any,  # noqa: ANN401 - kernels by name
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    *,
    reduced_amaxes: Sequence[torch.Tensor] | None = None,
    fp8_maxima: Sequence[float],
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> None:
    reduced = itertools.repeat(None) if reduced_amaxes is None else reduced_amaxes
    for history, scale, amax, fp8_max in zip(amax_histories, scales, reduced, fp8_maxima, strict=False):
        parts.update(
            history, scale, reduced_amax=amax, fp8_max=fp8_max, margin=margin, amax_compute_algo=amax_compute_algo
        )


def _parts(call: Call) -> dict[str, Call]:
    names = {"amax_history": "amax_histories", "scale": "scales", "reduced_amax": "reduced_amaxes"}
    kinds = {one: call.kinds[many] for one, many in names.items()}
    return {"update": Call("update_delayed_scale", call.device, kinds, call.flags)}


register_composition("update_delayed_scales", _compose, _parts)
