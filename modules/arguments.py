"""Checks of constructor arguments, and refusals by name of those whose feature is not built yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.errors import ArgumentError, UnsupportedError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What each argument belongs to, for the message.
_FEATURES = {
    "sequence_parallel": "sequence parallelism",
    "tp_group": "tensor parallelism",
    "tp_size": "tensor parallelism",
    "parallel_mode": "tensor parallelism",
    "ub_overlap_ag": "overlap of communication and gemm",
    "ub_overlap_rs": "overlap of communication and gemm",
    "ub_overlap_rs_dgrad": "overlap of communication and gemm",
    "ub_bulk_dgrad": "overlap of communication and gemm",
    "ub_bulk_wgrad": "overlap of communication and gemm",
    "ub_name": "overlap of communication and gemm",
    "delay_wgrad_compute": "delayed wgrad",
    "symmetric_ar_type": "symmetric-memory all-reduce",
    "return_layernorm_output_gathered": "sequence parallelism",
    "set_parallel_mode": "tensor parallelism",
    "checkpoint": "recompute",
    "seq_length": "preparing kernels for a size",
    "micro_batch_size": "preparing kernels for a size",
    "sm_margin": "multiprocessors left free on NVIDIA GPUs",
}


def refuse_later(
    where: str,
    given: Mapping[str, object],
    defaults: Mapping[str, object],
    features: Mapping[str, str] = _FEATURES,
) -> None:
    """Accept arguments of later features at their default only.

    Args:
        where: the module's class, for the message.
        given: the arguments as passed.
        defaults: their defaults, which change nothing.
        features: what each belongs to.

    Raises:
        UnsupportedError: one differs; names it and its feature.
    """
    for name, value in given.items():
        default = defaults[name]
        if value is not default and value != default:
            raise UnsupportedError(
                f"{where}: {name}",
                got=f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value),
                accepted=repr(default),
                todo=f"leave it out: {features[name]} is not built yet",
            )


def check_size(where: str, size: object) -> int:
    """A positive int.

    Raises:
        ArgumentError: anything else.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ArgumentError(where, got=repr(size), accepted="a positive int", todo="correct it")
    return size


def check_callable(where: str, function: object) -> None:
    """A function, or None for a default.

    Raises:
        ArgumentError: anything else.
    """
    if function is not None and not callable(function):
        raise ArgumentError(where, got=repr(function), accepted="a function, or None", todo="pass a function")


def check_epsilon(where: str, epsilon: object) -> float:
    """What a norm adds under the root, as a float.

    Raises:
        ArgumentError: no number, negative, or not a number in IEEE 754's sense.
    """
    if isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool) and epsilon >= 0:  # NaN is not
        return float(epsilon)
    raise ArgumentError(where, got=repr(epsilon), accepted="a number of at least 0", todo="correct it")


def check_dtype(where: str, dtype: object) -> torch.dtype:
    """A dtype that kernels take; None stands for torch's default dtype.

    Raises:
        ArgumentError: another dtype, or torch's default dtype is another.
    """
    chosen = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(chosen, torch.dtype) or chosen not in FLOATS:
        raise ArgumentError(
            where,
            got=repr(dtype) if dtype is not None else f"None, torch's default dtype being {chosen}",
            accepted="torch.float32, torch.bfloat16, torch.float16, or None for torch's default dtype",
            todo="pass one of these; FP8 is what te.autocast makes of parameters of such a dtype",
        )
    return chosen
