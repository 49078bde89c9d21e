"""Capability questions and answers: one object feeds selection, errors, skips and explanations."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from te_hal.schema.storage import StorageKind

    #: What an operand is, without its data: a dtype, a storage's kind, or None where it is left out.
    Kind = torch.dtype | StorageKind | None


class Code(str, enum.Enum):
    """Why an answer is no."""

    YES = "yes"
    NO_KERNEL = "no_kernel"
    DEVICE = "device"
    DTYPE = "dtype"
    FORMAT = "format"
    MODE = "mode"
    LAYOUT = "layout"
    FLAG = "flag"
    ENVIRONMENT = "environment"
    LOAD_FAILED = "load_failed"
    POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Support:
    """Yes, or no with a machine code and the sentence the user sees. Truthy when yes.

    Raises:
        ArgumentError: ``code`` is neither a :class:`Code` nor the value of one, which becomes that code.
    """

    code: Code = Code.YES
    sentence: str = ""

    def __post_init__(self) -> None:
        if type(self.code) is not Code:
            object.__setattr__(self, "code", _code(self.code))

    def __bool__(self) -> bool:
        return self.code is Code.YES

    @staticmethod
    def no(code: Code, sentence: str) -> Support:
        """A refusal; ``sentence`` says what is lacking and stands alone in an error message.

        Raises:
            ArgumentError: ``code`` is no reason: unknown, or yes.
        """
        answer = Support(code, sentence)
        if answer:
            raise _no_reason(code)
        return answer


def _code(value: object) -> Code:
    try:
        return Code(value)
    except ValueError:
        raise _no_reason(value) from None


def _no_reason(value: object) -> ArgumentError:
    return ArgumentError(
        "Support: code",
        got=repr(value),
        accepted=", ".join(f"Code.{code.name}" for code in Code if code is not Code.YES),
        todo="name the reason, or return SUPPORTED for a yes",
    )


SUPPORTED = Support()


@dataclass(frozen=True, slots=True)
class Call:
    """The full description of an op call that a capability answer may depend on.

    Attributes:
        op: name of the op.
        device: device of the operands.
        kinds: operand name to dtype, storage kind or None.
        flags: keyed flags by name (see ``Flag.keyed``); sizes and numbers are not part of it.
    """

    op: str
    device: torch.device
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    flags: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name}={kind}" for name, kind in self.kinds.items() if kind is not None]
        parts += [f"{name}={getattr(value, 'value', value)}" for name, value in self.flags.items()]
        return f"{self.op}({', '.join(parts)}) on {self.device}"
