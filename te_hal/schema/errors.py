"""The error hierarchy. Every message carries four facts: where, what was got, what is accepted, what to do."""

from __future__ import annotations


class TeHalError(Exception):
    """Root of everything te_hal raises on purpose.

    Args:
        where: op, module or file the error is about, with the backend where one is involved.
        got: what was found.
        accepted: what would have been right.
        todo: what the reader can do next.
    """

    def __init__(self, where: str, *, got: str, accepted: str, todo: str) -> None:
        self.where, self.got, self.accepted, self.todo = where, got, accepted, todo
        super().__init__(f"{where}: got {got}; accepted: {accepted}; {todo}")

    def tell_place(self, place: str) -> None:
        """Have the message say where in a model this happened; once.

        Args:
            place: for example ``layers.3.mlp of GPT``.
        """
        self.place = place
        self.where = f"{self.where} (at {place})"
        self.args = (f"{self.where}: got {self.got}; accepted: {self.accepted}; {self.todo}",)

    def __reduce__(self) -> tuple[object, ...]:
        facts = {"got": self.got, "accepted": self.accepted, "todo": self.todo}
        return (_rebuild, (type(self), self.where, facts))


def _rebuild(error: type[TeHalError], where: str, facts: dict[str, str]) -> TeHalError:
    return error(where, **facts)


class ArgumentError(TeHalError, ValueError):
    """An argument has the wrong value, dtype, rank, shape or device."""


class ArgumentTypeError(TeHalError, TypeError):
    """An argument is not of a type that can be used at all."""


class StateError(TeHalError, RuntimeError):
    """A call that is right in itself came at the wrong time."""


class UnsupportedError(TeHalError, NotImplementedError):
    """Nobody here can do what was asked: not built, or not by the chosen backend."""


class NotBuiltError(UnsupportedError, AttributeError):
    """A public name of Transformer Engine that this version does not have yet (``hasattr`` answers no)."""


class BackendNotFoundError(TeHalError, ValueError):
    """No backend of that name is known."""


class BackendUnavailableError(TeHalError, RuntimeError):
    """The backend is known but cannot be used on this machine, or not for these tensors."""


class KernelError(TeHalError, RuntimeError):
    """A kernel library, or the device under it, failed in a call that it had accepted."""


class UnknownNameError(TeHalError, KeyError):
    """Something is asked for by a name that nobody has given."""

    __str__ = Exception.__str__  # KeyError shows the repr of its message


class RegistrationError(TeHalError, ValueError):
    """A backend does not match the op interface, or its name is taken."""


class CheckpointError(TeHalError, RuntimeError):
    """A saved state is cut short, altered, or belongs to another configuration."""
