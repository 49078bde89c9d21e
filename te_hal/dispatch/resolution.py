"""From a described call to the kernel that runs it: selection, capability, composition, fallback, memo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import choice, fallback, fork, registry, selection
from te_hal.dispatch import policy as policies
from te_hal.schema.checks import compile_entry
from te_hal.schema.errors import StateError, UnsupportedError
from te_hal.schema.support import SUPPORTED, Code, Support
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


def resolve(call: Call) -> Resolved:
    """Choose the kernel for a call under the selection in force. Nothing is launched, nothing remembered.

    First the backend of the policy's ``per_op`` entry, else the forced one, else the one that claims the
    device; where it has no kernel or says no, the op's composition, if it is an optional op; then the policy's
    fallbacks that serve the device, in order.

    Raises:
        BackendNotFoundError, BackendUnavailableError: no backend can be chosen for this device.
        UnsupportedError: nobody asked can run the call; holds every reason.
        StateError: a device backend that was in use before this process was forked.
    """
    return _resolve(call, selection.current())


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
        kernel = memo[key] = _resolve(call(), selection).kernel
    return kernel


def support_for(call: Call) -> Support:
    """Whether :func:`resolve` would find a kernel: yes, or the no of the backend that is asked first.

    Leaves no trace: nothing is counted, announced or marked as used.

    Raises:
        BackendNotFoundError, BackendUnavailableError: no backend can be chosen for this device.
    """
    chosen = selection.current()
    policies.check_names(chosen.policy, chosen.policy_by)
    first = choice.choose(chosen, call.device, call.op)
    answer = ask_declared(first, call)
    if answer:
        return SUPPORTED
    parts = parts_of(call)
    if parts is not None:
        return next((no for no in map(support_for, parts) if not no), SUPPORTED)
    others = (name for name in chosen.policy.fallback if name != first.name)
    return SUPPORTED if any(_ask_substitute(name, call)[0] is not None for name in others) else answer


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
    kernel = _resolve(call, chosen).kernel
    if key is not None:
        memo[key] = kernel
    return kernel


def _resolve(call: Call, chosen: Selection) -> Resolved:
    policies.check_names(chosen.policy, chosen.policy_by)
    first = choice.choose(chosen, call.device, call.op)
    answer = ask_declared(first, call)
    if answer:
        fork.note_use(first.name, call.device)
        return Resolved(first, first.kernels[call.op])
    refused = [(first.name, answer)]
    composition = registry.REGISTRY.compositions.get(call.op)
    if composition is not None:
        return Resolved(first, composition.bind(call, lambda part: _resolve(part, chosen).kernel))
    for name in chosen.policy.fallback:
        if name == first.name:
            continue
        substitute, answer = _ask_substitute(name, call)
        if substitute is not None:
            fork.note_use(name, call.device)
            fallback.announce(call.op, first.name, name, refused[0][1].sentence)
            kernel = fallback.counted(call.op, first.name, name, substitute.kernels[call.op])
            return Resolved(substitute, kernel)
        refused.append((name, answer))
    raise UnsupportedError(
        f"{call.op} on backend {first.name}",
        got=str(call),
        accepted="nobody: " + "; ".join(f"{name}: {answer.sentence}" for name, answer in refused),
        todo="change the call, choose another backend, or list one in te_hal.Policy(fallback=...)",
    )


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


def _ask_substitute(name: str, call: Call) -> tuple[Backend | None, Support]:
    known = registry.tables()
    backend = known.backends.get(name)
    if backend is None:
        return None, Support.no(Code.LOAD_FAILED, known.failures[name])
    answer = ask_backend(backend, call)
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
