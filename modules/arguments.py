"""Checks of arguments of many modules, and why several of them refuse the same ones."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch

from te_hal.schema.errors import ArgumentError, ArgumentTypeError
from te_hal.schema.formats import FLOATS

_T = TypeVar("_T")

_TENSOR_PARALLEL = (
    "every process has whole layers: te_hal splits no weights over processes, and no layer communicates with another's"
)
_SEQUENCE_PARALLEL = "it splits rows over the processes of tensor parallelism, and te_hal splits no layer over any"
_CONTEXT_PARALLEL = "every process attends to whole sequences: te_hal exchanges no keys and values between processes"
_OVERLAP = "it overlaps products with the communication of tensor parallelism, and no layer of te_hal communicates"

#: Why arguments of several callables are refused.
REASONS = {
    "sequence_parallel": _SEQUENCE_PARALLEL,
    "return_layernorm_output_gathered": _SEQUENCE_PARALLEL,
    **dict.fromkeys(("tp_group", "tp_size", "parallel_mode", "set_parallel_mode"), _TENSOR_PARALLEL),
    **dict.fromkeys(
        ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "cp_size", "cp_rank"), _CONTEXT_PARALLEL
    ),
    **dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_tp_comm_overlap"), _OVERLAP),
    **dict.fromkeys(("ub_bulk_dgrad", "ub_bulk_wgrad", "ub_name", "userbuffers_options"), _OVERLAP),
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_mode", "tensor_parallel_group"), _TENSOR_PARALLEL),
    "symmetric_ar_type": "it chooses the all-reduce of tensor parallelism, and no layer of te_hal communicates",
    "sm_margin": "it keeps NVIDIA's multiprocessors free for communication; te_hal's ops know no units of a device",
}


def check_size(where: str, size: object) -> int:
    """A positive int.

    Raises:
        ArgumentError: anything else.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ArgumentError(where, got=repr(size), accepted="a positive int", todo="correct it")
    return size


def check_prepared_sizes(where: str, seq_length: object, micro_batch_size: object) -> None:
    """Sizes that Transformer Engine prepares kernels for; here nothing is prepared, and they change nothing.

    Raises:
        ArgumentError: neither None nor a positive int.
    """
    for name, size in (("seq_length", seq_length), ("micro_batch_size", micro_batch_size)):
        if size is not None:
            check_size(f"{where}: {name}", size)


def check_tensor(where: str, value: object) -> torch.Tensor:
    """A tensor, plain or quantized.

    Raises:
        ArgumentTypeError: anything else.
    """
    if not isinstance(value, torch.Tensor):
        got = f"a {type(value).__name__}"
        raise ArgumentTypeError(where, got=got, accepted="a torch.Tensor", todo="pass a tensor")
    return value


def check_callable(where: str, function: object) -> None:
    """A function, or None for a default.

    Raises:
        ArgumentError: anything else.
    """
    if function is not None and not callable(function):
        raise ArgumentError(where, got=repr(function), accepted="a function, or None", todo="pass a function")


def check_number(where: str, number: object, between: tuple[float, float] | None = None) -> float:
    """A number, as a float.

    Args:
        where: names the argument, for the message.
        number: as given.
        between: the least and the largest that is taken; None: any.

    Raises:
        ArgumentError: no number, or out of these bounds.
    """
    known = isinstance(number, (int, float)) and not isinstance(number, bool)
    if known and (between is None or between[0] <= number <= between[1]):  # type: ignore[operator] # a number
        return float(number)  # type: ignore[arg-type] # a number
    accepted = "a number" if between is None else f"a number from {between[0]} to {between[1]}"
    raise ArgumentError(where, got=repr(number), accepted=accepted, todo="correct it")


def check_epsilon(where: str, epsilon: object) -> float:
    """What a norm adds under the root, as a float.

    Raises:
        ArgumentError: no number, negative, or not a number in IEEE 754's sense.
    """
    if isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool) and epsilon >= 0:  # NaN is not
        return float(epsilon)
    raise ArgumentError(where, got=repr(epsilon), accepted="a number of at least 0", todo="correct it")


def renamed(where: str, name: str, value: _T | None, older_name: str, older: _T | None) -> _T | None:
    """The value of an argument of a function under ``run_eagerly``, whose caller is warned of the older name.

    Raises:
        ArgumentError: both are given.
    """
    if older is None:
        return value
    if value is not None:
        got = f"both {older_name} and {name}"
        raise ArgumentError(f"{where}: {older_name}", got=got, accepted="one of them", todo=f"pass {name}")
    warnings.warn(f"{where}: {older_name} is the older name of {name}", DeprecationWarning, stacklevel=4)
    return older


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
