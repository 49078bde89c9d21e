"""What operations on many tensors are given: chunk sizes, flags, lists of tensors, numbers."""

from __future__ import annotations

import torch

from te_hal.quantization.quantizer_arguments import noop_number
from te_hal.schema.errors import ArgumentError, ArgumentTypeError


def check_chunk(where: str, chunk_size: object) -> None:
    """Refuse a chunk size that is no int above 0.

    Raises:
        ArgumentError: see above.
    """
    if type(chunk_size) is not int or chunk_size < 1:
        got = repr(chunk_size)
        raise ArgumentError(f"{where}: chunk_size", got=got, accepted="an int of at least 1", todo="correct it")


def check_fp32(where: str, lists: list[list[torch.Tensor]]) -> None:
    """Refuse moments and masters of other dtypes: a step in fp32 writes them in place.

    Raises:
        ArgumentError: see above.
    """
    found = {tensor.dtype for of in lists for tensor in of}
    if found != {torch.float32}:
        raise ArgumentError(
            f"{where}: tensor_lists",
            got=f"moments or masters of {', '.join(sorted(map(str, found)))}",
            accepted="torch.float32",
            todo="use te.optimizers.FusedAdam, whose moments may have fewer bits",
        )


def tensors_of(where: str, tensor_lists: object, *counts: int) -> list[list[torch.Tensor]]:
    """Lists of one length, whose tensors at one place have one shape.

    Args:
        where: who asks.
        tensor_lists: what was given.
        counts: how many lists there may be; none: any number.

    Raises:
        ArgumentTypeError: no lists of tensors.
        ArgumentError: another number of lists, no tensors, lengths or shapes that differ.
    """
    if not isinstance(tensor_lists, (list, tuple)) or not all(isinstance(of, (list, tuple)) for of in tensor_lists):
        got = f"a {type(tensor_lists).__name__}"
        raise ArgumentTypeError(f"{where}: tensor_lists", got=got, accepted="lists of tensors", todo="pass lists")
    lists = [list(of) for of in tensor_lists]
    if not all(isinstance(tensor, torch.Tensor) for of in lists for tensor in of):
        raise ArgumentTypeError(
            f"{where}: tensor_lists", got="what is no tensor", accepted="lists of tensors", todo="pass tensors"
        )
    lengths = [len(of) for of in lists]
    if not lists or len(set(lengths)) > 1 or not lengths[0] or (counts and len(lists) not in counts):
        wanted = f"{' or '.join(map(str, counts))} lists" if counts else "lists"
        raise ArgumentError(
            f"{where}: tensor_lists",
            got=f"{len(lists)} lists of {lengths} tensors",
            accepted=f"{wanted} of one length above 0",
            todo="correct them",
        )
    for place, tensors in enumerate(zip(*lists, strict=True)):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(set(shapes)) > 1:
            got = f"shapes {shapes} at {place}"
            accepted = "one shape at each place"
            raise ArgumentError(f"{where}: tensor_lists", got=got, accepted=accepted, todo="correct them")
    return lists


def is_set(where: str, noop_flag: object) -> bool:
    """Whether a flag is set, to anything but 0; a None never is.

    Raises:
        ArgumentError: no tensor of one element.
    """
    return noop_flag is not None and noop_number(where, noop_flag) != 0.0


def number(where: str, value: object) -> float:
    """An int or float as a float.

    Raises:
        ArgumentError: neither.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ArgumentError(where, got=repr(value), accepted="a number", todo="correct it")
