"""list_backends: every backend as data, for people and for the command line."""

from __future__ import annotations

from dataclasses import dataclass

from te_hal.dispatch import choice, registry, selection


@dataclass(frozen=True)
class BackendInfo:
    """One row of ``list_backends``.

    Attributes:
        name: what ``set_backend`` takes; for a failure that concerns no single backend, the entry-point group.
        usable: whether it works on this machine.
        reason: why not; empty when usable.
        serves: device types that it can take, sorted; empty when it failed to load.
        default_for: device types that it claims unasked, sorted.
        description: its own line about itself.
        forced: set_backend, use_backend or TE_HAL_BACKEND names it.
        default: what the default device's tensors get when nothing is forced.
    """

    name: str
    usable: bool
    reason: str
    serves: tuple[str, ...] = ()
    default_for: tuple[str, ...] = ()
    description: str = ""
    forced: bool = False
    default: bool = False


def list_backends() -> list[BackendInfo]:
    """All backends sorted by name, usable or not, each asked afresh. Raises nothing about any of them."""
    known = registry.tables()
    forced = selection.current().forced
    rows = {
        name: BackendInfo(name, usable=False, reason=reason, forced=name == forced)
        for name, reason in known.failures.items()
    }
    answers = {name: registry.ask_usable(backend, afresh=True) for name, backend in known.backends.items()}
    claimants = choice.claims(choice.default_device().type)
    for name, backend in known.backends.items():
        rows[name] = BackendInfo(
            name,
            usable=bool(answers[name]),
            reason=answers[name].sentence,
            serves=tuple(sorted(backend.serves)),
            default_for=tuple(sorted(backend.default_for)),
            description=backend.description,
            forced=name == forced,
            default=claimants == [backend],
        )
    return [rows[name] for name in sorted(rows)]
