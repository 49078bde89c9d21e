"""Checks of constructor arguments, and refusals by name of those whose feature is not built yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What each argument belongs to, for the message.
_FEATURES = {
    "sequence_parallel": "sequence parallelism",
    "tp_group": "tensor parallelism",
    "tp_size": "tensor parallelism",
    "parallel_mode": "tensor parallelism",
    "get_rng_state_tracker": "the RNG tracker",
    "rng_tracker_name": "the RNG tracker",
    "ub_overlap_ag": "overlap of communication and gemm",
    "ub_overlap_rs": "overlap of communication and gemm",
    "ub_overlap_rs_dgrad": "overlap of communication and gemm",
    "ub_bulk_dgrad": "overlap of communication and gemm",
    "ub_bulk_wgrad": "overlap of communication and gemm",
    "ub_name": "overlap of communication and gemm",
    "delay_wgrad_compute": "delayed wgrad",
    "symmetric_ar_type": "symmetric-memory all-reduce",
    "sm_margin": "multiprocessors left free on NVIDIA GPUs",
}


def refuse_later(where: str, given: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Accept arguments of later features at their default only.

    Args:
        where: the module's class, for the message.
        given: the arguments as passed.
        defaults: their defaults, which change nothing.

    Raises:
        UnsupportedError: one differs; names it and its feature.
    """
    for name, value in given.items():
        default = defaults[name]
        if value is not default and value != default:
            raise UnsupportedError(
                f"{where}: {name}",
                got=repr(value),
                accepted=repr(default),
                todo=f"leave it out: {_FEATURES[name]} is not built yet",
            )


def check_size(where: str, size: object) -> int:
    """A positive int.

    Raises:
        ArgumentError: anything else.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ArgumentError(where, got=repr(size), accepted="a positive int", todo="correct it")
    return size


def check_dtype(where: str, dtype: object) -> torch.dtype:
    """A dtype that parameters can have; None stands for torch's default dtype.

    Raises:
        ArgumentError: no floating-point dtype of 16 bits or more.
    """
    chosen = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point or chosen.itemsize == 1:
        raise ArgumentError(
            where,
            got=repr(dtype),
            accepted="torch.float32, torch.bfloat16, torch.float16, or None for torch's default dtype",
            todo="FP8 is what te.autocast makes of parameters of such a dtype",
        )
    return chosen
