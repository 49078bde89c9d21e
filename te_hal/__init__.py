"""Transformer-Engine modules and FP8 recipes on a device-neutral op interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal._version import __version__
from te_hal.dispatch import (
    Policy,
    fallback_report,
    get_backend,
    get_policy,
    list_backends,
    reset,
    set_backend,
    set_policy,
    use_backend,
    use_policy,
)

if TYPE_CHECKING:
    from te_hal.monitoring import monitor

__all__ = [
    "Policy",
    "__version__",
    "fallback_report",
    "get_backend",
    "get_policy",
    "list_backends",
    "monitor",
    "reset",
    "set_backend",
    "set_policy",
    "use_backend",
    "use_policy",
]


def __getattr__(name: str) -> object:
    """``monitor`` stands above the modules, which ``import te_hal`` does not load."""
    if name == "monitor":
        from te_hal.monitoring import monitor  # noqa: PLC0415 - see above

        return monitor
    msg = f"module 'te_hal' has no attribute {name!r}"
    raise AttributeError(msg)
