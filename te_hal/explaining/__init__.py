"""Saying what would run and why: te_hal.explain.

Stands above the modules; launches no kernel. ``docs/explain.md`` reads an answer line by line.

- explanation: the public function.
- op: of one call of an op. described: that call, from names and dtypes.
- model: of the calls that a model's modules have seen. copies: what they make and keep.
- kernel: what a kernel is called.
"""

from __future__ import annotations

from te_hal.explaining.explanation import explain
from te_hal.explaining.model import ModelExplanation, ModuleExplanation, PlanExplanation
from te_hal.explaining.op import Answer, OpExplanation, explain_call

__all__ = [
    "Answer",
    "ModelExplanation",
    "ModuleExplanation",
    "OpExplanation",
    "PlanExplanation",
    "explain",
    "explain_call",
]
