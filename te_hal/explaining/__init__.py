"""Saying what would run and why, why nothing else, and what ran: te_hal.explain, te_hal.why_not, te_hal.report.

Stands above the modules; launches no kernel. ``docs/explain.md`` reads an answer line by line.

- explanation: the public function.
- op: of one call of an op. described: that call, from names and dtypes.
- model: of the calls that a model's modules have seen. copies: what they make and keep.
- reasons: why others do not run it. run_report: what ran in this process so far.
- kernel: what a kernel is called.
"""

from __future__ import annotations

from te_hal.explaining.explanation import explain
from te_hal.explaining.model import ModelExplanation, ModuleExplanation, PlanExplanation
from te_hal.explaining.op import Answer, OpExplanation, explain_call
from te_hal.explaining.reasons import Reason, WhyNot, why_not
from te_hal.explaining.run_report import RunReport, RunRow, report

__all__ = [
    "Answer",
    "ModelExplanation",
    "ModuleExplanation",
    "OpExplanation",
    "PlanExplanation",
    "Reason",
    "RunReport",
    "RunRow",
    "WhyNot",
    "explain",
    "explain_call",
    "report",
    "why_not",
]
