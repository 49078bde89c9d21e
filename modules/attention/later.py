"""Arguments of Transformer Engine's attention modules that are refused: not built yet, or of other kernels."""

from __future__ import annotations

from typing import Any

from te_hal.modules.arguments import refuse_later
from te_hal.schema.errors import UnsupportedError

_OF_CONSTRUCTOR: dict[str, object] = {
    "sequence_parallel": False,
    "tp_size": 1,
    "tp_group": None,
    "cp_group": None,
    "cp_global_ranks": None,
    "cp_stream": None,
    "cp_comm_type": "p2p",
    "set_parallel_mode": False,
    "ub_bulk_wgrad": False,
    "ub_bulk_dgrad": False,
    "ub_overlap_rs_dgrad": False,
    "ub_overlap_rs": False,
    "ub_overlap_ag": False,
}

#: Default, and why another value is refused.
_REFUSED: dict[str, tuple[object, str]] = {
    "fp8_output": (False, "attention runs in the activation dtype, also under a recipe, and so does what it gives"),
    "bf16_backward": (False, "it is about FP8 attention, and attention here runs in the activation dtype both ways"),
    "num_splits": (1, "how keys are split over kernels is up to torch, and changes no result by more than a rounding"),
    "score_mod": (
        None,
        'no backend takes one; a core_attention_bias of type "post_scale_bias" adds any tensor to the scores',
    ),
}


def refuse_later_settings(where: str, arguments: dict[str, Any]) -> None:
    """Accept a constructor's arguments of later features, found among ``arguments``, at their default only.

    Raises:
        UnsupportedError: one differs; names it and its feature.
    """
    refuse_later(where, arguments, _OF_CONSTRUCTOR)


def refuse_later_attention(where: str, arguments: dict[str, Any]) -> None:
    """Accept a call's arguments of kernels that no backend has, at their default only.

    Raises:
        UnsupportedError: one differs; names it and the reason.
    """
    for name, (default, reason) in _REFUSED.items():
        value = arguments.get(name, default)
        if value is not default and value != default:
            raise UnsupportedError(
                f"{where}: {name}", got=repr(value), accepted=repr(default), todo=f"leave it out: {reason}"
            )
