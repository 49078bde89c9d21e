"""Looking into a model while it trains: te_hal.monitor.

Stands above the modules. What the numbers mean is in docs/monitor.md.

- model_monitor: the public function and what it returns.
- watching: the places in a model that are looked at.
- statistics: what is counted about one tensor.
- history: those numbers by module, role and step.
- nonfinite: the first NaN or Inf.
"""

from __future__ import annotations

from te_hal.monitoring.model_monitor import Monitor, monitor
from te_hal.monitoring.nonfinite import NonFiniteError, NonFiniteWarning

__all__ = ["Monitor", "NonFiniteError", "NonFiniteWarning", "monitor"]
