"""What a model's modules run for the calls that they have seen, by module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import use_observer
from te_hal.explaining.copies import copies_of
from te_hal.explaining.op import OpExplanation, explain_call
from te_hal.modules.plan_cache import PlanCache
from te_hal.schema.errors import BackendNotFoundError, BackendUnavailableError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    import torch

    from te_hal.dispatch import Binding
    from te_hal.schema.support import Call


@dataclass(frozen=True)
class PlanExplanation:
    """What a module runs for one kind of call.

    Attributes:
        ops: in the order of binding; an op that is bound twice for the same call stands once.
        copies: what is made and kept of each quantized operand, in words, by operand.
        choice: of attention, which implementation runs, and why; else empty.
        refusal: why nothing runs under the selection in force; else empty.
    """

    ops: tuple[OpExplanation, ...]
    copies: dict[str, str]
    choice: str
    refusal: str


@dataclass(frozen=True)
class ModuleExplanation:
    """What a module runs.

    Attributes:
        name: in the model; empty for the model itself.
        type: its class.
        plans: one for each kind of call that it has seen; none before the first forward.
        joined: of an op of te.ops that ran as part of another, with which; else empty.
    """

    name: str
    type: str
    plans: tuple[PlanExplanation, ...]
    joined: str = ""


@dataclass(frozen=True)
class ModelExplanation:
    """What a model's modules run; those of te_hal, in the order of the model."""

    modules: tuple[ModuleExplanation, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.modules:
            yield "no module of te_hal in here"
        for module in self.modules:
            yield f"{module.name or 'the model'}: {module.type}"
            if not module.plans:
                yield f"  {module.joined or 'no forward yet, so nothing is known of its calls'}"
            for number, plan in enumerate(module.plans, 1):
                if len(module.plans) > 1:
                    yield f"  kind of call {number} of {len(module.plans)}"
                yield from (f"  {line}" for line in _plan_lines(plan))

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "modules": [
                {
                    "name": module.name,
                    "type": module.type,
                    "joined": module.joined,
                    "plans": [
                        {
                            "ops": [op.as_dict() for op in plan.ops],
                            "copies": plan.copies,
                            "choice": plan.choice,
                            "refusal": plan.refusal,
                        }
                        for plan in module.plans
                    ],
                }
                for module in self.modules
            ]
        }


def _plan_lines(plan: PlanExplanation) -> Iterator[str]:
    if plan.choice:
        yield plan.choice
    for operand, sentence in plan.copies.items():
        yield f"copies of {operand}: {sentence}"
    for op in plan.ops:
        yield f"{op.call}"
        yield f"  {op.in_short()}"
    if plan.refusal:
        yield f"then nothing runs: {plan.refusal}"


def explain_model(model: torch.nn.Module) -> ModelExplanation:
    """What every module of te_hal in a model runs now, for the kinds of call that it has seen.

    Plans are made anew under the selection in force, and dropped; those that the modules keep stay as they are.
    Launches nothing.
    """
    found = []
    for name, module in model.named_modules():
        cache = getattr(module, "_plans", None)
        if isinstance(cache, PlanCache):
            plans = tuple(_explain_plan(cache, key) for key in cache.keys())  # noqa: SIM118 - iterating gives plans
            joined = getattr(module, "joined", "")
            found.append(ModuleExplanation(name, type(module).__name__, plans, joined))
    return ModelExplanation(tuple(found))


def _explain_plan(cache: PlanCache[Any, Any], key: Hashable) -> PlanExplanation:
    calls: list[Call] = []
    refusal, plan = "", None

    def note(binding: Binding) -> Callable[..., Any]:
        if not binding.part:
            calls.append(binding.call)
        return binding.kernel

    with use_observer(note):
        try:
            plan = cache.make_unkept(key)
        except (UnsupportedError, BackendNotFoundError, BackendUnavailableError) as error:
            refusal = str(error)
    choice = getattr(plan, "choice", None)
    return PlanExplanation(
        ops=tuple(explain_call(call) for call in _each_once(calls)),
        copies=copies_of(plan),
        choice="" if choice is None else str(choice),
        refusal=refusal,
    )


def _each_once(calls: list[Call]) -> list[Call]:
    """Calls hold mappings and cannot be hashed."""
    return [call for place, call in enumerate(calls) if call not in calls[:place]]
