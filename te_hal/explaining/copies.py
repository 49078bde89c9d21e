"""Which copies of quantized operands a plan makes and keeps, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.modules.plan import LinearPlan
from te_hal.quantization.linear_calls import HybridCopies

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from te_hal.quantization.linear_calls import Copies
    from te_hal.quantization.operand_formats import HybridFormat

#: Operand, and the fields of LinearCopies that say when each copy is made and kept.
_FIELDS = (
    ("input", (("made", "input_made"), ("kept for the backward", "input_kept"), ("made again", "input_remade"))),
    ("weight", (("made", "weight_made"), ("kept for the backward", "weight_kept"))),
    ("grad_output", (("made", "grad_made"),)),
)


def copies_of(plan: object) -> dict[str, str]:
    """A sentence per quantized operand, by gemm and operand; none without FP8.

    Args:
        plan: of a module, with the plans of its gemms in it; such as have no gemm have no copies.
    """
    return {
        f"{name} {operand}".strip(): sentence
        for name, linear in _linear_plans(plan)
        for operand, sentence in _sentences(linear).items()
    }


def _linear_plans(plan: Any, name: str = "") -> Iterator[tuple[str, LinearPlan]]:  # noqa: ANN401 - any module's plan
    if isinstance(plan, LinearPlan):
        yield name, plan
        return
    fields: Mapping[str, object] = plan._asdict() if hasattr(plan, "_asdict") else {}
    for field, value in fields.items():
        yield from _linear_plans(value, field)


def _sentences(plan: LinearPlan) -> dict[str, str]:
    if plan.key.formats is None:
        return {}
    found = {}
    for operand, fields in _FIELDS:
        of = plan.key.format_of(operand)
        parts = [f"{when} {_names(getattr(plan.copies, field))}" for when, field in fields]
        parts = [part for part in parts if not part.endswith(" none")]
        if of is not None and parts:
            found[operand] = f"{of.format.name}/{of.mode.value}: {', '.join(parts)}"
        hybrid = plan.key.formats.hybrid(operand)
        if hybrid is not None:
            found[operand] = _of_parts(plan, operand, hybrid)
    return found


def _of_parts(plan: LinearPlan, operand: str, hybrid: HybridFormat) -> str:
    """An operand that two quantizers cast."""
    made = plan.copies.hybrid(operand) or HybridCopies(None, None)
    parts = ((hybrid.rowwise, made.rowwise), (hybrid.columnwise, made.columnwise))
    texts = [
        f"{of.format.name}/{of.mode.value} made {_names(copies)}" if of is not None else "plain"
        for of, copies in parts
        if copies is not None
    ]
    return f"two quantizers: {', then '.join(texts)}"


def _names(copies: Copies) -> str:
    return "+".join(name for name in ("rowwise", "columnwise") if getattr(copies, name)) or "none"
