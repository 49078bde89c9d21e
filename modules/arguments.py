"""Checks of arguments of many modules, and refusals by name of those whose feature is not built yet."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

import torch

from te_hal.schema.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = TypeVar("_T")

_SEQUENCE_PARALLEL, _TENSOR_PARALLEL, _CONTEXT_PARALLEL = (
    "sequence parallelism",
    "tensor parallelism",
    "context parallelism",
)
_OVERLAP = "the overlap of communication and gemm"

#: What each argument of a later feature belongs to, for the message.
_FEATURES = {
    "sequence_parallel": _SEQUENCE_PARALLEL,
    "return_layernorm_output_gathered": _SEQUENCE_PARALLEL,
    **dict.fromkeys(("tp_group", "tp_size", "parallel_mode", "set_parallel_mode"), _TENSOR_PARALLEL),
    **dict.fromkeys(
        ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "cp_size", "cp_rank"), _CONTEXT_PARALLEL
    ),
    **dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_tp_comm_overlap"), _OVERLAP),
    **dict.fromkeys(("ub_bulk_dgrad", "ub_bulk_wgrad", "ub_name"), _OVERLAP),
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_mode", "tensor_parallel_group"), _TENSOR_PARALLEL),
    "userbuffers_options": _OVERLAP,
    **dict.fromkeys(
        ("sample_kwargs", "retain_graph_in_backward", "cache_quantized_params"), "this kind of device graph"
    ),
    "amax_reduction_group": "a reduction over processes inside of a device graph",
    "symmetric_ar_type": "symmetric-memory all-reduce",
    **dict.fromkeys(("qb_histogram", "qb_bin_bounds", "qb_histogram_mode"), "quantile balancing"),
    "max_token_num": "memory set aside for a number of tokens",
    "use_grouped_tensor": "one kernel over all products of GroupedLinear",
    "distribute_saved_activations": _TENSOR_PARALLEL,
    **dict.fromkeys(("double_buffering", "manual_synchronization"), "another order of copies than layer by layer"),
    "sm_margin": "multiprocessors that kernels leave free",
    "fp8_grad": "a quantized gradient of a norm",
}


def refuse_later(where: str, given: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Accept arguments of later features at their default only.

    Args:
        where: the module's class, for the message.
        given: arguments as passed, by name; others may be among them.
        defaults: of those of later features, which change nothing.

    Raises:
        UnsupportedError: one differs; names it and its feature.
    """
    for name, default in defaults.items():
        value = given.get(name, default)
        if value is default or (not isinstance(value, torch.Tensor) and value == default):
            continue
        raise UnsupportedError(
            f"{where}: {name}",
            got=f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value),
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
