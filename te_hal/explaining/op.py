"""Who runs one call of an op: the backend, the kernel or the parts it is composed of, and everybody's answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import Runs, ask_backend, parts_of, permission, registry, verdict
from te_hal.explaining.kernel import kernel_name
from te_hal.schema.errors import BackendNotFoundError, BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_hal.dispatch import Verdict
    from te_hal.schema.support import Call

_IN_WORDS = {
    Runs.KERNEL: "its own kernel",
    Runs.COMPOSITION: "composed",
    Runs.FALLBACK: "a fallback that the policy allows",
    Runs.NOBODY: "nobody",
}


@dataclass(frozen=True)
class Answer:
    """What a backend says to a call, by itself.

    Attributes:
        backend: its name.
        yes: it can run the call.
        sentence: of a no, what is lacking; of a yes, how it goes about it, or empty.
        code: of a no, the value of its te_hal.schema.support.Code; else "yes".
    """

    backend: str
    yes: bool
    sentence: str
    code: str


@dataclass(frozen=True)
class OpExplanation:
    """Who runs a call.

    Attributes:
        call: the call.
        backend: on which the choice fell; of a fallback, whose kernel runs; empty where none can be chosen.
        runs: "kernel", "composition", "fallback" or "nobody".
        kernel: name of the function, or of the composition; empty for nobody.
        how: what the backend says of its way (a gemm: by which product), or why nobody runs it.
        parts: of a composition, the calls that it is made of; none where it is plain torch.
        answers: of every known backend, by name.
        first: the backend that is asked first; empty where none can be chosen.
        chosen_by: who chose that one: a function, a variable, the policy's order, its claim on the device.
    """

    call: Call
    backend: str
    runs: str
    kernel: str
    how: str
    parts: tuple[OpExplanation, ...]
    answers: tuple[Answer, ...]
    first: str = ""
    chosen_by: str = ""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield str(self.call)
        yield from (f"  {line}" for line in self.runner_lines())
        yield "  every backend by itself"
        for answer in self.answers:
            yield f"    {answer.backend}: {'yes' if answer.yes else 'no'}{_after_comma(answer.sentence)}"

    def runner_lines(self) -> Iterator[str]:
        """Who runs it, with the parts, without the call and the other backends."""
        kernel = f" ({self.kernel})" if self.kernel else ""
        yield f"runs on {self.backend or 'no backend'}: {_IN_WORDS[Runs(self.runs)]}{kernel}"
        if self.how:
            yield f"  {self.how}"
        if self.chosen_by:
            first = "asked first" if self.runs in (Runs.FALLBACK.value, Runs.NOBODY.value) else "chosen"
            yield f"  {first}: {self.first}, by {self.chosen_by}"
        if self.runs == Runs.COMPOSITION.value:
            yield f"  made of {'these calls' if self.parts else 'plain torch alone'}"
        for part in self.parts:
            yield f"  {part.call}"
            yield from (f"    {line}" for line in part.runner_lines())

    def in_short(self) -> str:
        """Who runs it, in one line without the call."""
        if self.runs == Runs.COMPOSITION.value:
            parts = ", ".join(f"{part.call.op} ({part.in_short()})" for part in self.parts)
            return f"{self.backend}, composed of {parts or 'plain torch'}"
        if self.runs == Runs.NOBODY.value:
            return f"nobody: {self.how}"
        way = next((a.sentence for a in self.answers if a.backend == self.backend and a.yes), "")
        fallback = ", a fallback" if self.runs == Runs.FALLBACK.value else ""
        return f"{self.backend}{fallback}{_after_comma(way)}"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "call": str(self.call),
            "op": self.call.op,
            "backend": self.backend,
            "runs": self.runs,
            "kernel": self.kernel,
            "how": self.how,
            "first": self.first,
            "chosen_by": self.chosen_by,
            "parts": [part.as_dict() for part in self.parts],
            "answers": [vars(answer) for answer in self.answers],
        }


def _after_comma(text: str) -> str:
    return f", {text}" if text else ""


def explain_call(call: Call) -> OpExplanation:
    """Who runs a call under the selection in force. Launches nothing and leaves no trace.

    Raises:
        ArgumentError, BackendNotFoundError: the policy names an op or backend that does not exist.
        StateError: a backend gives no answer.
    """
    answers = _answers(call)
    try:
        found = verdict(call)
    except (BackendNotFoundError, BackendUnavailableError) as error:
        return OpExplanation(call, "", Runs.NOBODY.value, "", str(error), (), answers)
    parts = parts_of(call) if found.runs is Runs.COMPOSITION else ()
    return OpExplanation(
        call=call,
        backend=(found.by or found.first).name,
        runs=found.runs.value,
        kernel=_kernel(call, found),
        how=_how(found),
        parts=tuple(map(explain_call, parts or ())),
        answers=answers,
        first=found.first.name,
        chosen_by=found.chosen_by,
    )


def _answers(call: Call) -> tuple[Answer, ...]:
    known = registry.tables()
    failed = [Answer(name, yes=False, sentence=reason, code="load_failed") for name, reason in known.failures.items()]
    asked = []
    for name, backend in known.backends.items():
        answer = permission(call.op, name) and ask_backend(backend, call)
        asked.append(Answer(name, yes=bool(answer), sentence=answer.sentence, code=answer.code.value))
    return tuple(sorted([*failed, *asked], key=lambda each: each.backend))


def _kernel(call: Call, found: Verdict) -> str:
    if found.by is not None:
        return kernel_name(found.by.kernels[call.op])
    if found.runs is Runs.COMPOSITION:
        return kernel_name(registry.REGISTRY.compositions[call.op].function)
    return ""


def _how(found: Verdict) -> str:
    if found.runs is Runs.KERNEL:
        return found.answer.sentence or found.first.description
    return "because " + "; ".join(f"{name} {answer.sentence}" for name, answer in found.refused)
