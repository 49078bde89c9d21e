"""te_hal.why_not: the reasons why other implementations do not run, of one call or of a whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import list_backends
from te_hal.explaining.explanation import explain
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_hal.explaining.model import ModelExplanation
    from te_hal.explaining.op import OpExplanation


@dataclass(frozen=True)
class Reason:
    """Why a backend does not run a call.

    Attributes:
        backend: its name.
        call: as text.
        sentence: what it lacks or what keeps it; of one that could, why another was chosen.
        code: the value of its te_hal.schema.support.Code; "yes": it could.
        runs_on: what runs the call instead; "nobody: ..." where nothing does.
        modules: where a model has such calls; none for a call that was asked about by itself.
    """

    backend: str
    call: str
    sentence: str
    code: str
    runs_on: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class WhyNot:
    """Reasons, by backend and then in the order of the calls.

    Attributes:
        backends: that were asked about.
        reasons: one for each call that such a backend does not run.
        calls: how many different calls were asked about.
    """

    backends: tuple[str, ...]
    reasons: tuple[Reason, ...]
    calls: int

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.calls:
            yield "no calls to ask about: run a forward first"
        for backend in self.backends if self.calls else ():
            mine = [reason for reason in self.reasons if reason.backend == backend]
            if not mine:
                yield f"{backend}: runs it" if self.calls == 1 else f"{backend}: runs all {self.calls} calls"
                continue
            sentences = {reason.sentence for reason in mine}
            if len(sentences) == 1 and len(mine) == self.calls:
                yield f"{backend}: {mine[0].sentence}"
                continue
            yield f"{backend}: does not run {len(mine)} of {self.calls} calls"
            for sentence in dict.fromkeys(reason.sentence for reason in mine):
                yield f"  {sentence}"
                yield from (f"    {reason.call}{_where(reason)}" for reason in mine if reason.sentence == sentence)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "backends": list(self.backends),
            "calls": self.calls,
            "reasons": [{**vars(reason), "modules": list(reason.modules)} for reason in self.reasons],
        }


def _where(reason: Reason) -> str:
    return f" (in {', '.join(reason.modules)})" if reason.modules else ""


def why_not(
    target: str | torch.nn.Module,
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    **arguments: Any,  # noqa: ANN401 - as te_hal.explain
) -> WhyNot:
    """Why an implementation does not run an op, or the ops of a model. Launches nothing, changes nothing.

    Args:
        target: an op's name; or a module or model after a forward, for the calls it has seen.
        backend: the one to ask about; None: every one.
        device: of an op's operands; None: the default device.
        arguments: of an op, as :func:`te_hal.explain` takes them.

    Returns:
        Data; its ``str`` is the text, ``as_dict()`` plain values.

    Raises:
        ArgumentError: no backend of that name; else as :func:`te_hal.explain`.
        ArgumentTypeError: neither a name nor a module.
    """
    names = [info.name for info in list_backends()]
    if backend is not None and backend not in names:
        raise ArgumentError("te_hal.why_not", got=f"backend {backend!r}", accepted=", ".join(names), todo="name one")
    if isinstance(target, torch.nn.Module):
        if arguments or device is not None:
            explain(target, device=device, **arguments)  # type: ignore[call-overload] # refuses both for a module
        asked = _calls_of(explain(target))
    else:
        asked = [(explain(target, device=device, **arguments), ())]
    chosen = tuple(name for name in names if backend in (None, name))
    reasons = [reason for name in chosen for call, modules in asked for reason in _reason(name, call, modules)]
    return WhyNot(chosen, tuple(reasons), len(asked))


def _calls_of(model: ModelExplanation) -> list[tuple[OpExplanation, tuple[str, ...]]]:
    """Every different call of a model, with the modules that make it."""
    found: dict[str, tuple[OpExplanation, dict[str, None]]] = {}
    for module in model.modules:
        for plan in module.plans:
            for op in plan.ops:
                found.setdefault(str(op.call), (op, {}))[1][module.name or "the model"] = None
    return [(op, tuple(modules)) for op, modules in found.values()]


def _reason(backend: str, op: OpExplanation, modules: tuple[str, ...]) -> Iterator[Reason]:
    """The reason why the backend does not run the call; none where it does, with a kernel or by composition."""
    if backend == op.backend:
        return
    answer = next(answer for answer in op.answers if answer.backend == backend)
    runs_on = op.in_short()
    sentence = answer.sentence
    if answer.yes:
        sentence = f"could, but {op.first or 'nobody'} is asked first ({op.chosen_by or op.how})"
    yield Reason(backend, str(op.call), sentence, answer.code, runs_on, modules)
