"""From a described call to the kernel that runs it: selection, capability, composition, fallback, memo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import fallback, fork, registry, selection
from te_hal.dispatch.observer import Binding
from te_hal.dispatch.verdict import Runs, verdict
from te_hal.schema.checks import compile_entry
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.support import SUPPORTED, Support
from te_hal.schema.validate import describe_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.dispatch.selection import Selection
    from te_hal.schema.backend import Backend
    from te_hal.schema.op import OpSchema
    from te_hal.schema.support import Call


@dataclass(frozen=True, slots=True)
class Resolved:
    """Who runs a call.

    Attributes:
        backend: the backend whose kernel this is; where the op is composed, the one that the choice fell on.
        kernel: what to call, with the arguments of the op's schema. Counts itself where it is a fallback.
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
    return _resolve(call, under or selection.current(), shared=False)


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
    kernel = memo.get(key)
    if kernel is None:
        kernel = memo[key] = _resolve(call(), selection, shared=True).kernel
    return kernel


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


def _on_miss(schema: OpSchema, key: tuple[object, ...] | None, arguments: dict[str, Any]) -> Callable[..., Any]:
    call = describe_call(schema, arguments)
    chosen = selection.current()
    # Taken before the registry is read: what changes meanwhile brings a new memo, and this one is dropped.
    memo = chosen.memo
    kernel = _resolve(call, chosen, shared=True).kernel
    if key is not None:
        memo[key] = kernel
    return kernel


def _resolve(call: Call, chosen: Selection, *, shared: bool, part: bool = False) -> Resolved:
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
    return Resolved(found.backend, chosen.observer(Binding(call, found.backend, found.kernel, shared, part)))


def _find(call: Call, chosen: Selection, *, shared: bool) -> Resolved:
    found = verdict(call, chosen)
    first = found.first
    if found.runs is Runs.COMPOSITION:
        composition = registry.REGISTRY.compositions[call.op]
        return Resolved(
            first, composition.bind(call, lambda part: _resolve(part, chosen, shared=shared, part=True).kernel)
        )
    if found.by is None:
        raise UnsupportedError(
            f"{call.op} on backend {first.name}",
            got=str(call),
            accepted="nobody: " + "; ".join(f"{name}: {answer.sentence}" for name, answer in found.refused),
            todo="change the call, choose another backend, or list one in te_hal.Policy(fallback=...)",
        )
    fork.note_use(found.by.name, call.device)
    kernel = found.by.kernels[call.op]
    if found.runs is Runs.FALLBACK:
        fallback.announce(call.op, first.name, found.by.name, found.answer.sentence)
        kernel = fallback.counted(call.op, first.name, found.by.name, kernel)
    return Resolved(found.by, kernel)
