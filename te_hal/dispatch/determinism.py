"""set_deterministic: whether nothing may be chosen whose result depends on the order in which a device does things."""

from __future__ import annotations

from te_hal.dispatch.registry import REGISTRY
from te_hal.schema.flags import check_flags


class _InForce:
    """For the whole process."""

    wanted = False


def forget() -> None:
    """Back to the start value."""
    _InForce.wanted = False


def set_deterministic(enabled: bool) -> None:
    """Have the same calls give the same bytes every time, on one machine with one number of threads.

    te_hal's own kernels and reference always do: they add in an order of their own. What differs from run to run are
    torch's attention kernels on a device, whose backward adds the parts of a gradient as they come; with this on,
    attention is written out there (``DotProductAttention.choice`` says so). torch's other operations follow
    ``torch.use_deterministic_algorithms``, which stays the caller's.

    Args:
        enabled: False, the start value, lifts it.

    Raises:
        ArgumentError: no bool.
    """
    check_flags("te_hal.set_deterministic", {"enabled": enabled})
    _InForce.wanted = enabled
    REGISTRY.changed()  # plans that were made by the other choice go


def is_deterministic() -> bool:
    """Whether :func:`set_deterministic` is on."""
    return _InForce.wanted
