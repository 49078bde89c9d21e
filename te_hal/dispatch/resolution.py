"""From a described call to the kernel that runs it: selection, capability, composition, fallback, memo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import fallback, fork, registry, selection
from te_hal.dispatch.calls import count_of, counting
from te_hal.dispatch.observer import Binding
from te_hal.dispatch.runs import Runs
from te_hal.dispatch.verdict import verdict
from te_hal.schema.checks import compile_entry
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.support import SUPPORTED, Support
from te_hal.schema.validate import describe_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.dispatch.calls import Count
    from te_hal.dispatch.selection import Selection
    from te_hal.schema.backend import Backend
    from te_hal.schema.op import OpSchema
    from te_hal.schema.support import Call


@dataclass(frozen=True, slots=True)
class Resolved:
    """Who runs a call.

    Attributes:
        backend: the backend whose kernel this is; where the op is composed, the one that the choice fell on.
        kernel: what to call, with the arguments of the op's schema. Counts its calls.
    """

    backend: Backend
    kernel: Callable[..., Any]


def entry(schema: OpSchema) -> Callable[..., Any]:
    """The checked entry of an op: takes all arguments in the order of ``schema.signature``, returns the kernel."""
    return compile_entry(schema, selection.current_memo, _on_miss)


def resolve(call: Call, under: Selection | None = None) -> Resolved:
    """Choose the kernel for a call under the selection in force. Nothing is launched, nothing remembered.

    First the backend of the policy's ``per_op`` entry, else the forced one, else the one that claims the
    device; where it has no kernel or says no, the op's composition, if it is an optional op; then the policy's
    fallbacks that serve the device, in order.

    Args:
        call: described, not made.
        under: another selection than the one in force.

    Raises:
        BackendNotFoundError, BackendUnavailableError: no backend can be chosen for this device.
        UnsupportedError: nobody asked can run the call; holds every reason.
        StateError: a device backend that was in use before this process was forked.
    """
    found = _resolve(call, under or selection.current(), shared=False)
    return Resolved(found.backend, found.self_counting())


def kernel_under(selection: Selection, key: tuple[object, ...], call: Callable[[], Call]) -> Callable[..., Any]:
    """The kernel for a call under a selection that :func:`current_selection` gave, maybe in another thread.

    For work that belongs to a forward and is done later. Remembered in the selection's memo, so that asking again costs
    a look-up. Like every kernel it checks nothing.

    Args:
        selection: under which the call is resolved.
        key: tells such calls apart; begins with the caller's own name, which is no op's.
        call: describes it, when the kernel is not remembered.

    Raises:
        As :func:`resolve`.
    """
    memo = selection.memo
    known = memo.get(key)
    if known is None:
        found = _resolve(call(), selection, shared=True)
        known = memo[key] = (found.self_counting(), found.count)
    return known[0]


def support_for(call: Call) -> Support:
    """Whether :func:`resolve` would find a kernel: yes, or the no of the backend that is asked first.

    Leaves no trace: nothing is counted, announced or marked as used.

    Raises:
        BackendNotFoundError, BackendUnavailableError: no backend can be chosen for this device.
    """
    found = verdict(call)
    if found.runs is Runs.COMPOSITION:
        return next((no for no in map(support_for, parts_of(call) or ()) if not no), SUPPORTED)
    return found.answer if found.runs is Runs.NOBODY else SUPPORTED


def parts_of(call: Call) -> tuple[Call, ...] | None:
    """The calls that a call of an optional op is composed of, none for plain torch; None: the op has no composition."""
    composition = registry.REGISTRY.compositions.get(call.op)
    if composition is None:
        return None
    return () if composition.parts is None else tuple(composition.parts(call).values())


@dataclass(frozen=True, slots=True)
class _Found:
    """Who runs a call, and where its calls are counted."""

    op: str
    backend: Backend
    kernel: Callable[..., Any]
    count: Count

    def self_counting(self) -> Callable[..., Any]:
        """The kernel for whoever keeps it, and counts nothing."""
        return counting(self.op, self.kernel, self.count)


def _on_miss(
    schema: OpSchema, key: tuple[object, ...] | None, arguments: dict[str, Any]
) -> tuple[Callable[..., Any], Count]:
    call = describe_call(schema, arguments)
    chosen = selection.current()
    # Taken before the registry is read: what changes meanwhile brings a new memo, and this one is dropped.
    memo = chosen.memo
    found = _resolve(call, chosen, shared=True)
    hit = (found.kernel, found.count)
    if key is not None:
        memo[key] = hit
    return hit


def _resolve(call: Call, chosen: Selection, *, shared: bool, part: bool = False) -> _Found:
    """The kernel for a call, handed to the selection's observer where it has one.

    Args:
        call: what is to run.
        chosen: the selection.
        shared: the kernel is kept in a memo, and whoever makes such a call next gets it too.
        part: the call is a part of a composed one.
    """
    found = _find(call, chosen, shared=shared)
    if chosen.observer is None:
        return found
    observed = chosen.observer(Binding(call, found.backend, found.kernel, shared, part))
    return _Found(call.op, found.backend, observed, found.count)


def _find(call: Call, chosen: Selection, *, shared: bool) -> _Found:
    found = verdict(call, chosen)
    first = found.first
    count = count_of(call.op, found) if chosen.counted else [0]
    if found.runs is Runs.COMPOSITION:
        composition = registry.REGISTRY.compositions[call.op]
        kernel = composition.bind(call, lambda part: _resolve(part, chosen, shared=shared, part=True).self_counting())
        return _Found(call.op, first, kernel, count)
    if found.by is None:
        raise UnsupportedError(
            f"{call.op} on backend {first.name}",
            got=str(call),
            accepted="nobody: " + "; ".join(f"{name}: {answer.sentence}" for name, answer in found.refused),
            todo="change the call, choose another backend, or list one in te_hal.Policy(fallback=...)",
        )
    fork.note_use(found.by.name, call.device)
    if found.runs is Runs.FALLBACK:
        fallback.announce(call.op, first.name, found.by.name, found.answer.sentence)
    return _Found(call.op, found.by, found.by.kernels[call.op], count)
