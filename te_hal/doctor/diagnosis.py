"""The whole diagnosis: the installation, then every backend with the layers below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import current_selection, list_backends
from te_hal.doctor.check import Check, State
from te_hal.doctor.installation import installation_checks
from te_hal.doctor.musa_stack import musa_checks
from te_hal.doctor.native_stack import foreign_checks, native_checks
from te_hal.doctor.symptoms import cure_for
from te_hal.ffi.native import native_of
from te_hal.ffi.toolchains import TOOLCHAINS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_hal.dispatch import BackendInfo

_MUSA = "musa"


@dataclass(frozen=True)
class BackendDiagnosis:
    """A backend and what it stands on.

    Attributes:
        name: its name.
        usable: whether it works here.
        reason: why not, in its own words; empty when usable.
        cure: of a failure that is known, usual cause and what to do; else empty.
        selected: it takes tensors on the default device: forced, or the one that claims it.
        checks: the layers below it; none for one that needs none.
    """

    name: str
    usable: bool
    reason: str
    cure: str
    selected: bool
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        installation: what every backend stands on.
        backends: by name.
        forced: the backend that is forced, whether or not there is one of that name; empty where the device decides.
        forced_by: who forces it: TE_HAL_BACKEND, or a function.
    """

    installation: tuple[Check, ...]
    backends: tuple[BackendDiagnosis, ...]
    forced: str = ""
    forced_by: str = ""

    @property
    def healthy(self) -> bool:
        """Whether a backend is selected, and usable."""
        return any(each.selected and each.usable for each in self.backends)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "te-hal doctor"
        yield from (f"  {check}" for check in self.installation)
        for backend in self.backends:
            yield f"{backend.name}{' *' if backend.selected else ''}: {'usable' if backend.usable else 'not usable'}"
            if backend.reason:
                yield f"  why: {backend.reason}"
            if backend.cure:
                yield f"  known: {backend.cure}"
            yield from (f"  {check}" for check in backend.checks)
        yield self._verdict()

    def _verdict(self) -> str:
        wrong = [each for each in self.backends if each.selected and not each.usable]
        if self.healthy:
            return "* is selected, and usable"
        if wrong:
            return f"{wrong[0].name} is selected, and not usable"
        if self.forced:
            return f"{self.forced!r} is selected by {self.forced_by}, and there is no such backend"
        return "no backend is selected here; choose one with te_hal.set_backend(name) or TE_HAL_BACKEND"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for a bug report."""
        return {
            "healthy": self.healthy,
            "forced": self.forced,
            "installation": [check.as_dict() for check in self.installation],
            "backends": [
                {**vars(backend), "checks": [check.as_dict() for check in backend.checks]} for backend in self.backends
            ],
        }


def diagnose() -> Diagnosis:
    """Look at everything. Raises nothing about what it finds."""
    found = list_backends()
    chosen = current_selection()
    forced = chosen.forced
    selected = {info.name for info in found if (info.default if forced is None else info.forced)}
    return Diagnosis(
        forced=forced or "",
        forced_by=chosen.forced_by if forced else "",
        installation=tuple(installation_checks()),
        backends=tuple(_diagnose(info, selected=info.name in selected) for info in found),
    )


def _diagnose(info: BackendInfo, *, selected: bool) -> BackendDiagnosis:
    native = native_of(info.name)
    checks: list[Check] = []
    if native is not None:
        checks = native_checks(native.target) if native.target in TOOLCHAINS else foreign_checks(native)
    musa = native is not None and native.target == _MUSA
    if musa:
        checks = musa_checks() + checks
    words = " ".join([info.reason, *(check.found for check in checks if check.state is State.WRONG)])
    return BackendDiagnosis(
        name=info.name,
        usable=info.usable,
        reason=info.reason,
        cure=cure_for(words) if musa and not info.usable else "",
        selected=selected,
        checks=tuple(checks),
    )
