"""Transformer-Engine modules and FP8 recipes on a device-neutral op interface."""

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

__all__ = [
    "Policy",
    "__version__",
    "fallback_report",
    "get_backend",
    "get_policy",
    "list_backends",
    "reset",
    "set_backend",
    "set_policy",
    "use_backend",
    "use_policy",
]
