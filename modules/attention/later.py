"""Arguments of Transformer Engine's attention modules that are refused."""

from __future__ import annotations

from typing import Any

from te_hal.modules.arguments import REASONS
from te_hal.schema.refusals import declare, refuse

_OF_BOTH: dict[str, object] = {"sequence_parallel": False, "tp_size": 1, "tp_group": None}
_OF_CORE = declare(
    "DotProductAttention",
    _OF_BOTH | {"cp_group": None, "cp_global_ranks": None, "cp_stream": None, "cp_comm_type": "p2p"},
    REASONS,
)
_OVERLAPS = ("ub_bulk_wgrad", "ub_bulk_dgrad", "ub_overlap_rs_dgrad", "ub_overlap_rs", "ub_overlap_ag")
_OF_LAYER = declare(
    "MultiheadAttention", _OF_BOTH | {"set_parallel_mode": False} | dict.fromkeys(_OVERLAPS, False), REASONS
)
_OF_SCORES = ("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors")
_OF_CALL = declare(
    "DotProductAttention.forward",
    {"fp8_output": False, "bf16_backward": False, "num_splits": 1, **dict.fromkeys(_OF_SCORES)},
    {
        "fp8_output": "attention runs in the activation dtype, also under a recipe, and so does what it gives",
        "bf16_backward": "it is about FP8 attention, and attention here runs in the activation dtype both ways",
        "num_splits": "how keys are split over kernels is up to torch, and changes no result by more than a rounding",
        **dict.fromkeys(
            _OF_SCORES,
            'no backend takes functions of scores; a core_attention_bias of type "post_scale_bias" adds any tensor to '
            "them",
        ),
    },
)


def refuse_later_settings(where: str, arguments: dict[str, Any]) -> None:
    """Accept a constructor's arguments of parallelism, found among ``arguments``, at their default only.

    Raises:
        UnsupportedError: one differs; names it and the reason.
    """
    refuse(where, arguments, _OF_CORE | _OF_LAYER)


def refuse_later_attention(where: str, arguments: dict[str, Any]) -> None:
    """Accept a call's arguments of kernels that no backend has, at their default only.

    Raises:
        UnsupportedError: one differs; names it and the reason.
    """
    refuse(where, arguments, _OF_CALL)
