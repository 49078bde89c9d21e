"""Transformer-Engine modules and FP8 recipes on a device-neutral op interface."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from te_hal._version import __version__
from te_hal.dispatch import (
    Policy,
    fallback_report,
    get_backend,
    get_policy,
    list_backends,
    read_policy,
    reset,
    set_backend,
    set_deterministic,
    set_policy,
    use_backend,
    use_policy,
)

if TYPE_CHECKING:
    from te_hal.converting import convert
    from te_hal.explaining import explain, report, why_not
    from te_hal.monitoring import monitor
    from te_hal.shadowing import shadow

__all__ = [
    "Policy",
    "__version__",
    "convert",
    "explain",
    "fallback_report",
    "get_backend",
    "get_policy",
    "list_backends",
    "monitor",
    "read_policy",
    "report",
    "reset",
    "set_backend",
    "set_deterministic",
    "set_policy",
    "shadow",
    "use_backend",
    "use_policy",
    "why_not",
]


#: What stands above the modules, which `import te_hal` does not load, and where it is.
_ABOVE = {
    **dict.fromkeys(("explain", "report", "why_not"), "te_hal.explaining"),
    "convert": "te_hal.converting",
    "monitor": "te_hal.monitoring",
    "shadow": "te_hal.shadowing",
}


def __getattr__(name: str) -> object:
    """Load what stands above the modules when it is first asked for."""
    if name in _ABOVE:
        return getattr(import_module(_ABOVE[name]), name)
    msg = f"module 'te_hal' has no attribute {name!r}"
    raise AttributeError(msg)
