"""Who would run a call, and what everybody asked on the way answered. Leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_hal.dispatch import choice, policy_check, registry, selection
from te_hal.dispatch.runs import Runs
from te_hal.schema.errors import StateError
from te_hal.schema.support import SUPPORTED, Code, Support

if TYPE_CHECKING:
    from te_hal.dispatch.selection import Selection
    from te_hal.schema.backend import Backend
    from te_hal.schema.support import Call


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who would run a call.

    Attributes:
        first: the backend that the choice fell on.
        chosen_by: who chose it, in words: a function, a variable, the policy's order, its claim on the device.
        answer: what it said, or the policy on its behalf.
        runs: what runs the call; of a composition the parts are calls with verdicts of their own.
        by: the backend whose kernel runs; None for a composition and for nobody.
        refused: who said no on the way, in the order of asking.
    """

    first: Backend
    chosen_by: str
    answer: Support
    runs: Runs
    by: Backend | None
    refused: tuple[tuple[str, Support], ...]


def verdict(call: Call, chosen: Selection | None = None) -> Verdict:
    """Who would run a call.

    Args:
        call: described, not made.
        chosen: the selection; None: the one in force.

    Raises:
        ArgumentError, BackendNotFoundError: the policy names an op or a backend that does not exist.
        BackendUnavailableError: no backend can be chosen for this device.
        StateError: a backend's ``supports`` raises, or gives something else than a Support.
    """
    chosen = selection.current() if chosen is None else chosen
    policy_check.check_names(chosen.policy, chosen.policy_by)
    first, by = choice.choose(chosen, call.device, call.op)
    answer = permission(call.op, first.name, chosen) and ask_declared(first, call)
    if answer:
        return Verdict(first, by, answer, Runs.KERNEL, first, ())
    refused = [(first.name, answer)]
    if call.op in registry.REGISTRY.compositions:
        return Verdict(first, by, answer, Runs.COMPOSITION, None, tuple(refused))
    for name in chosen.policy.fallback_of(call.op):
        if name == first.name:
            continue
        substitute, reason = _ask_substitute(name, call, chosen)
        if substitute is not None:
            return Verdict(first, by, answer, Runs.FALLBACK, substitute, tuple(refused))
        refused.append((name, reason))
    return Verdict(first, by, answer, Runs.NOBODY, None, tuple(refused))


def permission(op: str, backend: str, chosen: Selection | None = None) -> Support:
    """Whether the policy lets a backend run an op.

    Args:
        op: its name.
        backend: its name.
        chosen: the selection; None: the one in force.
    """
    chosen = selection.current() if chosen is None else chosen
    barred = chosen.policy.bars(op, backend)
    if not barred:
        return SUPPORTED
    words = "denies it" if barred == "deny" else "allows others only"
    return Support.no(Code.POLICY, f"may not run {op}: {chosen.policy_by} {words}")


def ask_declared(backend: Backend, call: Call) -> Support:
    """What one backend declares, on whatever machine: has it the kernel, does it say yes. For backends known usable.

    Raises:
        StateError: its ``supports`` raises, or gives something else than a Support.
    """
    if call.op not in backend.kernels:
        return Support.no(Code.NO_KERNEL, f"has no kernel for {call.op}")
    try:
        answer = backend.supports(call)
    except (Exception, SystemExit) as error:  # somebody else's code, which can fail in any way
        raise StateError(
            f"backend {backend.name}: supports",
            got=f"{type(error).__name__}: {error} for {call}",
            accepted="an answer: supports raises nothing",
            todo="report this to the author of the backend, whose supports must say Support.no(code, sentence) instead",
        ) from error
    if not isinstance(answer, Support):
        raise StateError(
            f"backend {backend.name}: supports",
            got=f"{answer!r} for {call}",
            accepted="a te_hal.schema.support.Support",
            todo="return SUPPORTED or Support.no(code, sentence)",
        )
    return answer


def _ask_substitute(name: str, call: Call, chosen: Selection) -> tuple[Backend | None, Support]:
    known = registry.tables()
    backend = known.backends.get(name)
    if backend is None:
        return None, Support.no(Code.LOAD_FAILED, known.failures[name])
    answer = permission(call.op, name, chosen) and ask_backend(backend, call)
    return (backend if answer else None), answer


def ask_backend(backend: Backend, call: Call) -> Support:
    """What one backend answers, by itself: is it usable, does it serve the device, has it the kernel, does it say yes.

    Raises:
        StateError: its ``supports`` raises, or gives something else than a Support.
    """
    answer = registry.ask_usable(backend)
    if answer and not backend.takes(call.device.type):
        answer = Support.no(Code.DEVICE, f"does not serve {call.device.type}, only {', '.join(sorted(backend.serves))}")
    return ask_declared(backend, call) if answer else answer
