"""Checks of what quantizers and quantized tensors are called with."""

from __future__ import annotations

import torch

from te_hal.schema.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from te_hal.schema.formats import FLOAT32_MAX, FLOATS


def check_plain(where: str, tensor: object) -> None:
    """A tensor that is not quantized.

    Raises:
        ArgumentTypeError: anything else.
    """
    if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "quantized_storage"):
        return
    raise ArgumentTypeError(
        where,
        got=f"a {type(tensor).__name__}",
        accepted="a plain torch.Tensor",
        todo="call its dequantize() first" if isinstance(tensor, torch.Tensor) else "pass a tensor",
    )


def check_values(where: str, dtype: torch.dtype) -> None:
    """A dtype that is quantized, where no op sees the tensor as it came.

    Raises:
        ArgumentError: another one.
    """
    if dtype not in FLOATS:
        raise ArgumentError(
            where, got=f"a tensor of {dtype}", accepted=", ".join(map(str, FLOATS)), todo="cast it before"
        )


def check_nominal(where: str, dtype: object) -> None:
    """A nominal dtype, or None.

    Raises:
        ArgumentError: anything else.
    """
    if dtype is not None and dtype not in FLOATS:
        raise ArgumentError(
            f"{where}: dtype",
            got=repr(dtype),
            accepted=", ".join(map(str, FLOATS)),
            todo="name the dtype that dequantizing gives; the 8-bit format is the quantizer's own",
        )


def check_usage(where: str, usage: object) -> None:
    """Whether a copy is wanted: a bool, or None where that stays as it is.

    Raises:
        ArgumentError: anything else.
    """
    if usage is not None and not isinstance(usage, bool):
        raise ArgumentError(
            where, got=repr(usage), accepted="True, False, None", todo="pass a bool, or None to leave it as it is"
        )


def check_identity_usages(where: str, rowwise: object, columnwise: object) -> None:
    """Usages of what one buffer serves in both directions: any but none.

    Raises:
        ArgumentError: one is no bool, or both are False.
    """
    for name, usage in (("rowwise", rowwise), ("columnwise", columnwise)):
        check_usage(f"{where}.update_usage: {name}_usage", usage)
    if rowwise is columnwise is False:
        raise ArgumentError(
            f"{where}.update_usage",
            got="rowwise_usage=False, columnwise_usage=False",
            accepted="at least one of them",
            todo="drop the tensor itself to free its memory",
        )


def dropped_usages(where: str, has: dict[str, bool], rowwise: object, columnwise: object) -> dict[str, bool]:
    """Which of two parts stay, neither of which follows from the other.

    Raises:
        ArgumentError: one is no bool.
        UnsupportedError: a part that is not there is asked for.
    """
    wanted = dict(has)
    for name, usage in (("rowwise", rowwise), ("columnwise", columnwise)):
        check_usage(f"{where}.update_usage: {name}_usage", usage)
        if usage and not has[name]:
            raise UnsupportedError(
                f"{where}.update_usage: {name}_usage",
                got=f"True for a tensor without a {name} part",
                accepted="parts that are there: each is cast from the unquantized tensor",
                todo="quantize again with both usages",
            )
        wanted[name] = has[name] if usage is None else bool(usage)
    return wanted


def check_amax_epsilon(where: str, value: object) -> float:
    """A floor of amax, as the ops take it: kernels that a plan has bound check nothing.

    Raises:
        ArgumentError: no number from 0 to fp32's largest.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= FLOAT32_MAX:
        raise wrong(f"{where}: amax_epsilon", value, "a number from 0 to fp32's largest")
    return float(value)


def wrong(where: str, value: object, accepted: str) -> ArgumentError:
    """The error for an argument that is not among what is accepted."""
    return ArgumentError(where, got=repr(value), accepted=accepted, todo="correct the argument")


def noop_number(where: str, noop_flag: object) -> float:
    """The number that a flag on a device holds.

    Raises:
        ArgumentError: no tensor of one element.
    """
    if not isinstance(noop_flag, torch.Tensor) or noop_flag.numel() != 1:
        raise ArgumentError(
            f"{where}: noop_flag",
            got=f"shape {tuple(noop_flag.shape)}" if isinstance(noop_flag, torch.Tensor) else repr(noop_flag),
            accepted="a tensor of one element, or None",
            todo="pass torch.zeros(1) or torch.ones(1)",
        )
    return float(noop_flag)
