"""Who runs an op: registry, discovery, selection, capability answers, policy.

A backend is one object, returned by the function that its package's entry point names::

    [project.entry-points."te_hal.backends"]
    mychip = "mychip_te_hal:create_backend"

``docs/backends.md`` shows a complete one.
"""

from te_hal.dispatch.calls import CallCount, call_counts
from te_hal.dispatch.choice import backend_for, default_device, forced_backend, get_backend
from te_hal.dispatch.determinism import is_deterministic, set_deterministic
from te_hal.dispatch.fallback import FallbackWarning, fallback_report
from te_hal.dispatch.inventory import BackendInfo, list_backends
from te_hal.dispatch.observer import Binding, Observer
from te_hal.dispatch.policy import EVERY_OP, Policy
from te_hal.dispatch.policy_source import read_policy
from te_hal.dispatch.probe import Probed, probe_backends
from te_hal.dispatch.registry import register_backend, register_composition
from te_hal.dispatch.resolution import (
    Resolved,
    entry,
    kernel_under,
    parts_of,
    resolve,
    support_for,
)
from te_hal.dispatch.runs import Runs
from te_hal.dispatch.selection import (
    Selection,
    current_memo,
    get_policy,
    in_force,
    reset,
    set_backend,
    set_policy,
    use_backend,
    use_observer,
    use_policy,
)
from te_hal.dispatch.selection import current as current_selection
from te_hal.dispatch.verdict import Verdict, ask_backend, ask_declared, permission, verdict
from te_hal.schema.backend import ANY_DEVICE, Backend, GemmCopies

__all__ = [
    "ANY_DEVICE",
    "EVERY_OP",
    "Backend",
    "BackendInfo",
    "Binding",
    "CallCount",
    "FallbackWarning",
    "GemmCopies",
    "Observer",
    "Policy",
    "Probed",
    "Resolved",
    "Runs",
    "Selection",
    "Verdict",
    "ask_backend",
    "ask_declared",
    "backend_for",
    "call_counts",
    "current_memo",
    "current_selection",
    "default_device",
    "entry",
    "fallback_report",
    "forced_backend",
    "get_backend",
    "get_policy",
    "in_force",
    "is_deterministic",
    "kernel_under",
    "list_backends",
    "parts_of",
    "permission",
    "probe_backends",
    "read_policy",
    "register_backend",
    "register_composition",
    "reset",
    "resolve",
    "set_backend",
    "set_deterministic",
    "set_policy",
    "support_for",
    "use_backend",
    "use_observer",
    "use_policy",
    "verdict",
]
