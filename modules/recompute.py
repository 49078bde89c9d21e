"""Modules inside checkpointed functions: the second run computes what the first did, and changes nothing else.

Between the two runs scaling states roll, another autocast may be in force, weights may be kept anew. So the first run
leaves a :class:`CallRecord` per module (te_hal.quantization.checkpointed has where), and the second computes from it:
with the recipe, backend, scales and kept weights of then, recording no amax, taking no part in when states roll.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from te_hal.dispatch import current_selection, in_force
from te_hal.quantization import Float8Quantizer, HybridQuantizer
from te_hal.quantization.autocast import current_frame, frame_in_force, note_module
from te_hal.quantization.checkpointed import current_phase, is_in_backward
from te_hal.quantization.copies import with_copies
from te_hal.quantization.hybrid_storage import HybridStorage
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import ScalingMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.dispatch import Selection
    from te_hal.modules.main_grad import FirstMicrobatch
    from te_hal.modules.plan import LinearPlan
    from te_hal.modules.weight_cache import Quantized
    from te_hal.quantization.autocast import Frame
    from te_hal.quantization.checkpointed import Phase
    from te_hal.quantization.operand_formats import Formats
    from te_hal.quantization.quantizer import Quantizer

_P = ParamSpec("_P")
_R = TypeVar("_R")
_M = TypeVar("_M", bound=torch.nn.Module)


class CallRecord:
    """How a module ran when a checkpointed function ran for the first time.

    Args:
        owner: the module.
        expects_backward: gradients are off only because the function will run again.

    Attributes:
        frame: the autocast in force.
        selection: of backend and policy.
        formats: what the operands of each product became.
        quantizers: by direction. Those of the forward have copies of the scales, and record amax nowhere.
        backward_state: the state that rolls after the backward.
        weights: quantized ones that were kept or taken for ``is_first_microbatch``, by name.
        first_microbatches: what each product's weight gradient belongs to.
        updates: the module's backward ends with the update of backward scaling states.
    """

    __slots__ = (
        *("backward_state", "expects_backward", "first_microbatches", "formats", "frame", "owner", "quantizers"),
        *("selection", "updates", "weights"),
    )

    def __init__(self, owner: torch.nn.Module, expects_backward: bool) -> None:
        self.owner = owner
        self.expects_backward = expects_backward
        self.frame: Frame = current_frame()
        self.selection: Selection = current_selection()
        self.formats: dict[int, Formats | None] = {}
        self.quantizers: dict[str, list[Quantizer]] = {}
        self.backward_state: Any = None
        self.weights: dict[str, Quantized] = {}
        self.first_microbatches: dict[int, FirstMicrobatch | None] = {}
        self.updates = False

    @property
    def what(self) -> str:
        """The module's name."""
        return _name(self.owner)

    def take_quantizers(self, quantizers: dict[str, list[Quantizer]], backward_state: object) -> None:
        """Note what quantizes in this call."""
        self.quantizers = {
            "scaling_fwd": [_as_of_now(quantizer) for quantizer in quantizers["scaling_fwd"]],
            "scaling_bwd": list(quantizers["scaling_bwd"]),
        }
        self.backward_state = backward_state


def _as_of_now(quantizer: Quantizer) -> Quantizer:
    """One that makes the same codes later, and tells nobody."""
    made = quantizer.copy()
    made.observer = None
    if isinstance(made, HybridQuantizer):
        made.rowwise_quantizer = _as_of_now(made.rowwise_quantizer)
        made.columnwise_quantizer = _as_of_now(made.columnwise_quantizer)
    if isinstance(made, Float8Quantizer):
        made.scale, made.amax = made.scale.clone(), torch.zeros_like(made.amax)
    return made


def recomputable(forward: Callable[Concatenate[_M, _P], _R]) -> Callable[Concatenate[_M, _P], _R]:
    """For a module's ``forward``: keeps a record of its calls in a checkpointed function's first run, or follows it.

    What the forward finds in ``current_frame().record`` and ``.again`` says which of the two.
    """

    @functools.wraps(forward)
    def wrapper(self: _M, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        phase = current_phase()
        if phase is None or not (phase.recorders or phase.replayed is not None):
            return forward(self, *args, **kwargs)
        record = _record(phase, self)
        note_module()
        again = phase.replayed is not None
        calibrating = record.frame.calibrating and not again
        frame = record.frame._replace(record=record, again=again, calibrating=calibrating)
        elsewhere = record.selection is not current_selection()
        with frame_in_force(frame), in_force(record.selection) if elsewhere else nullcontext():
            return forward(self, *args, **kwargs)

    return wrapper


def _record(phase: Phase, module: torch.nn.Module) -> CallRecord:
    """The record of this call: found where the function runs again, else made; noted by functions that run first."""
    record: CallRecord
    if phase.replayed is not None:
        record = phase.replayed.replay(phase.run, module, _name(module))
    else:
        record = CallRecord(module, phase.expects_backward)
    for recorder in phase.recorders:
        recorder.add(record)
    return record


def _name(module: torch.nn.Module) -> str:
    return str(getattr(module, "label", type(module).__name__))


def computes_for_backward() -> bool:
    """Whether the innermost checkpointed function runs again, so that its result is read by nobody but the backward.

    That holds of torch's form without reentrance, which te_hal's own modules use for themselves.
    """
    phase = current_phase()
    return phase is not None and phase.replayed is not None and not phase.recorders


def kept_for_recompute(record: CallRecord, name: str, plan: LinearPlan) -> Quantized | None:
    """The weight that the first run kept or took, with the copies that this one reads; None: quantize it again.

    It is quantized again, to the same codes, where a copy is missing that does not follow from the other.
    """
    kept, made = record.weights.get(name), plan.copies.weight_made
    if kept is None:
        return None
    if isinstance(kept, HybridStorage):
        parts = plan.copies.hybrid("weight")
        return None if parts is None else kept.read_by(parts, plan.order)
    missing = (made.rowwise and not kept.kind.rowwise) or (made.columnwise and not kept.kind.columnwise)
    if missing and kept.mode is not ScalingMode.TENSOR:
        return None
    storage = with_copies(kept, rowwise=made.rowwise, columnwise=made.columnwise, order=plan.order)
    return storage.keep(rowwise=made.rowwise, columnwise=made.columnwise)


def refuse_recompute(module: str, *, fp8: bool) -> None:
    """Refuse an FP8 forward inside a backward pass that no record was made for.

    A gradient hook that runs a module would record amax in the middle of a step, for an update at no definite time.

    Args:
        module: module class and name, for the message.
        fp8: whether the module runs in FP8 now, or did in its last forward outside a backward.

    Raises:
        UnsupportedError: see above.
    """
    if fp8 and is_in_backward():
        raise UnsupportedError(
            module,
            got="an FP8 forward inside a backward pass: a hook that runs the module, or activation recompute by other "
            "means than te.checkpoint and torch.utils.checkpoint.checkpoint",
            accepted="a forward outside of it, or recompute by one of these two",
            todo="run what a hook needs after the backward; recompute by te.checkpoint",
        )
