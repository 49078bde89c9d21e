"""What is installed here, which backends work, and what to do about those that don't: `te-hal doctor`.

Stands above everything and may name vendors. Starts no device beyond what asking a backend whether it is usable does.

- diagnosis: all of it as data and as text.
- check: one finding. installation: Python, torch, te_hal itself, variables.
- native_stack: compiler, binding, kernel library of a native backend. musa_stack: what stands below torch_musa.
- symptoms: known failures of MUSA machines, by the words that they show themselves in.
"""

from __future__ import annotations

from te_hal.doctor.check import Check, State
from te_hal.doctor.diagnosis import BackendDiagnosis, Diagnosis, diagnose

__all__ = ["BackendDiagnosis", "Check", "Diagnosis", "State", "diagnose"]
