"""The amax family: absolute maxima, and the scales that come from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import entry
from te_hal.schema import amax as schemas
from te_hal.schema.formats import FLOAT32_MAX

if TYPE_CHECKING:
    import torch

_enter_amax = entry(schemas.AMAX)
_enter_compute_scale = entry(schemas.COMPUTE_SCALE)
_enter_update_delayed_scale = entry(schemas.UPDATE_DELAYED_SCALE)


def amax(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Largest magnitude of a tensor; NaN elements are ignored, infinities are not (A1).

    Args:
        input: any shape, empty included (the result is 0 then); fp32, fp16 or bf16.
        out: fp32, one element; becomes ``max(out, amax)`` in place.

    Returns:
        fp32, shape ``[1]``; ``out`` itself where given.

    Raises:
        ArgumentError, ArgumentTypeError: another dtype, an ``out`` of several elements, or several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_amax(input, out)
    result: torch.Tensor = kernel(input, out=out)
    return result


def compute_scale(
    amax: torch.Tensor,
    *,
    fp8_max: float,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    value_for_inf: float = FLOAT32_MAX,
) -> torch.Tensor:
    """The scale that maps ``amax`` to the largest finite code, with TE's special cases (S1 to S4).

    Args:
        amax: fp32, any shape.
        fp8_max: largest finite magnitude of the format, positive and within fp32's range.
        epsilon: floor of ``amax``, from 0 to fp32's largest.
        power_of_2: round the scale down to a power of two.
        value_for_inf: what an overflowing quotient becomes, positive and within fp32's range.

    Returns:
        A new fp32 tensor of the shape of ``amax``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_compute_scale(amax, fp8_max, epsilon, power_of_2, value_for_inf)
    result: torch.Tensor = kernel(
        amax, fp8_max=fp8_max, epsilon=epsilon, power_of_2=power_of_2, value_for_inf=value_for_inf
    )
    return result


def update_delayed_scale(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    *,
    reduced_amax: torch.Tensor | None = None,
    fp8_max: float,
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> None:
    """Roll the amax history of ``N`` tensors and renew their scales, both in place (D1 to D4).

    Args:
        amax_history: fp32 ``[L, N]``, L at least 1, written. Row 0 is the running amax, row L-1 the newest past one.
        scale: fp32 ``[N]``, written.
        reduced_amax: fp32 ``[N]``; stands for row 0 where the amax over all ranks is wanted.
        fp8_max: largest finite magnitude of the format, positive and within fp32's range.
        margin: the scale is divided by ``2**margin``; from -100 to 100.
        amax_compute_algo: ``"max"`` over the history, or ``"most_recent"``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above; nothing was changed.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_update_delayed_scale(amax_history, scale, reduced_amax, fp8_max, margin, amax_compute_algo)
    kernel(
        amax_history,
        scale,
        reduced_amax=reduced_amax,
        fp8_max=fp8_max,
        margin=margin,
        amax_compute_algo=amax_compute_algo,
    )
