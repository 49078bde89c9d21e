"""CustomScalingState: the quantizers that a factory gave one module and direction, and the state behind requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.quantization.amax_reduction import check_single_process
from te_hal.quantization.hybrid_quantizer import HybridQuantizer
from te_hal.quantization.operand_formats import Formats, HybridFormat, OperandFormat
from te_hal.quantization.quantizer_request import DelayedScalingRequest
from te_hal.quantization.scaling_state import BACKWARD_ROLES, FORWARD_ROLES, DelayedScalingState
from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.quantization.factory_answers import Answer
    from te_hal.quantization.quantizer import Quantizer


class CustomScalingState:
    """What a factory answered for the slots of one direction.

    Args:
        answers: by slot.
        roles: tensor types by slot.
        forward: direction.
        device: where state lives.

    Attributes:
        delayed: state of the slots that asked for delayed scaling; None where none did.
        formats: what operands become, by slot; None for those that stay plain.
    """

    def __init__(self, answers: Sequence[Answer], roles: Sequence[str], *, forward: bool, device: torch.device) -> None:
        self.answers = tuple(answers)
        self.roles = tuple(roles)
        self.forward = forward
        self.delayed: DelayedScalingState | None = None
        self.loaded_slots: tuple[int, ...] | None = None
        requests = [answer for answer in answers if isinstance(answer, DelayedScalingRequest)]
        if requests:
            recipe, slots = requests[0].recipe(), self.slots
            if recipe.reduce_amax:
                check_single_process("CustomRecipe: DelayedScalingRequest.reduce_amax", None)
            of_slots = [self.roles[slot] for slot in slots]
            self.delayed = DelayedScalingState(recipe, of_slots, forward=forward, device=device)
        self.formats = tuple(map(_format, self.make_quantizers()))

    @classmethod
    def loaded(cls, delayed: DelayedScalingState | None, slots: Sequence[int], *, forward: bool) -> CustomScalingState:
        """What a checkpoint knows: the state and its slots. It makes no quantizers, and waits for :meth:`take_over`."""
        made = cls((), (), forward=forward, device=torch.device("cpu"))
        made.delayed, made.loaded_slots = delayed, tuple(slots)
        return made

    @property
    def scale(self) -> torch.Tensor:
        """Scales of the slots with delayed scaling, in their order.

        Raises:
            AttributeError: there are none.
        """
        return self._of_requests("scale").scale

    @property
    def amax_history(self) -> torch.Tensor:
        """Histories of the slots with delayed scaling, a column each.

        Raises:
            AttributeError: there are none.
        """
        return self._of_requests("amax_history").amax_history

    def _of_requests(self, name: str) -> DelayedScalingState:
        if self.delayed is None:
            msg = f"no slot of this CustomRecipe has delayed scaling, so there is no {name!r}"
            raise AttributeError(msg)
        return self.delayed

    @property
    def slots(self) -> tuple[int, ...]:
        """Those whose state is kept."""
        if self.loaded_slots is not None:
            return self.loaded_slots
        return tuple(slot for slot, answer in enumerate(self.answers) if isinstance(answer, DelayedScalingRequest))

    def take_over(self, before: CustomScalingState, device: torch.device) -> None:
        """Go on with an earlier delayed-scaling state, adapted in place, where the same slots asked for it.

        Raises:
            StateError: the earlier one was loaded and belongs to other slots.
        """
        if before.loaded_slots is not None and self.slots != before.slots:
            raise StateError(
                "CustomRecipe",
                got=f"a factory that asks for delayed scaling in slots {list(self.slots)}",
                accepted=f"slots {list(before.slots)}, whose state was loaded",
                todo="use the factory of the saved model, or call forget_scaling_state() on the module",
            )
        if self.delayed is not None and before.delayed is not None and self.slots == before.slots:
            before.delayed.adapt(self.delayed.recipe, device)
            self.delayed = before.delayed

    def make_quantizers(self) -> list[Quantizer]:
        """One quantizer per slot: copies of the factory's, which may give one for several, and those over the state."""
        requested = iter([] if self.delayed is None else self.delayed.make_quantizers())
        return [
            next(requested) if isinstance(answer, DelayedScalingRequest) else _quantizer(answer, role)
            for answer, role in zip(self.answers, self.roles, strict=False)  # loaded ones have no answers yet
        ]


def _quantizer(answer: Quantizer, role: str) -> Quantizer:
    """A slot's own; of what leaves a module there is a rowwise copy only."""
    if isinstance(answer, HybridQuantizer) and role in ("output", "grad_input"):
        return answer.rowwise_quantizer.copy()
    return answer.copy()


def custom_formats(states: dict[str, CustomScalingState], gemm: int) -> Formats:
    """What the operands of product number ``gemm`` become by the quantizers of both directions."""
    forward, backward = len(FORWARD_ROLES), len(BACKWARD_ROLES)
    of_slots = [
        *states["scaling_fwd"].formats[forward * gemm : forward * (gemm + 1)],
        *states["scaling_bwd"].formats[backward * gemm : backward * (gemm + 1)],
    ]
    hybrids = [(role, of) for role, of in zip(_ROLES, of_slots, strict=True) if isinstance(of, HybridFormat)]
    plain = [None if isinstance(of, HybridFormat) else of for of in of_slots]
    inp, weight, output, grad_output, grad_input = plain
    return Formats(inp, weight, output, grad_output, grad_input, hybrids=tuple(hybrids))


_ROLES = FORWARD_ROLES + BACKWARD_ROLES


def _format(quantizer: Quantizer) -> OperandFormat | HybridFormat | None:
    if isinstance(quantizer, HybridQuantizer):
        rowwise, columnwise = _of_codes(quantizer.rowwise_quantizer), _of_codes(quantizer.columnwise_quantizer)
        return HybridFormat(rowwise, columnwise, quantizer.chained)
    return _of_codes(quantizer)


def _of_codes(quantizer: Quantizer) -> OperandFormat | None:
    if not quantizer.quantizes:
        return None
    return OperandFormat.of(quantizer.format, quantizer.mode, delayed=quantizer.delayed)
