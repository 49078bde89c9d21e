"""Checks of what the functions on experts' rows are called with."""

from __future__ import annotations

import torch

from te_hal.modules.arguments import check_tensor
from te_hal.modules.moe.row_functions import NOBODY
from te_hal.quantization.quantized_tensor import QuantizedTensor
from te_hal.schema.errors import ArgumentError, ArgumentTypeError
from te_hal.schema.formats import FLOATS

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_rows(where: str, inp: object, *, quantized: bool = True) -> torch.Tensor:
    """Rows ``[n, hidden]`` in a dtype of activations.

    Raises:
        ArgumentTypeError: no tensor; a quantized one where that cannot be.
        ArgumentError: another number of dimensions or another dtype.
    """
    inp = check_tensor(where, inp)
    if isinstance(inp, QuantizedTensor) and not quantized:
        raise ArgumentTypeError(
            f"{where}: inp", got=f"a {type(inp).__name__}", accepted="a plain tensor", todo="dequantize() it first"
        )
    if inp.dim() != 2 or inp.dtype not in FLOATS:  # noqa: PLR2004 - rows
        raise ArgumentError(
            f"{where}: inp",
            got=f"shape {tuple(inp.shape)} of {inp.dtype}",
            accepted=f"[rows, hidden] in {', '.join(map(str, FLOATS))}",
            todo="view it as rows, or cast it",
        )
    return inp


def check_integers(where: str, values: object, shape: tuple[int | None, ...], device: torch.device) -> torch.Tensor:
    """A tensor of integers of this shape (None: any size) on this device.

    Raises:
        ArgumentTypeError: no tensor.
        ArgumentError: another shape, dtype or device.
    """
    values = check_tensor(where, values)
    fits = values.dim() == len(shape) and all(s in (None, n) for s, n in zip(shape, values.shape, strict=True))
    if fits and values.dtype in _INTEGERS and values.device == device:
        return values
    wanted = ", ".join("*" if size is None else str(size) for size in shape)
    raise ArgumentError(
        where,
        got=f"shape {tuple(values.shape)} of {values.dtype} on {values.device}",
        accepted=f"[{wanted}] of integers on {device}",
        todo="pass what belongs to these rows, on their device",
    )


def checked_mask(where: str, routing_map: object, tokens: int, device: torch.device) -> torch.Tensor:
    """A routing mask as bool ``[tokens, experts]``.

    Raises:
        ArgumentTypeError: no tensor.
        ArgumentError: another shape or device, no integers or bools, values that are neither 0 nor 1.
    """
    name = f"{where}: routing_map"
    if isinstance(routing_map, torch.Tensor) and routing_map.dtype == torch.bool:
        check_integers(name, routing_map.view(torch.uint8), (tokens, None), device)
        return routing_map
    values = check_integers(name, routing_map, (tokens, None), device)
    if bool(((values != 0) & (values != 1)).any()):
        raise ArgumentError(
            name,
            got=f"values from {int(values.min())} to {int(values.max())}",
            accepted="1 where a token goes to an expert, else 0",
            todo='pass a mask, or indices with map_type="index"',
        )
    return values.to(torch.bool)


def checked_indices(where: str, routing_map: object, tokens: int, device: torch.device) -> torch.Tensor:
    """Expert indices as int64 ``[tokens, topk]``, -1 for a choice that was dropped.

    Raises:
        ArgumentTypeError: no tensor.
        ArgumentError: another shape, dtype or device; a value below -1.
    """
    name = f"{where}: routing_map"
    values = check_integers(name, routing_map, (tokens, None), device)
    if values.numel() and int(values.min()) < NOBODY:
        raise ArgumentError(
            name,
            got=f"the index {int(values.min())}",
            accepted="numbers of experts from 0 on, -1 for a choice that is dropped",
            todo="correct the index",
        )
    return values.to(torch.int64)


def checked_count(where: str, num_out_tokens: object, routed: int) -> int | None:
    """How many rows come out; None for as many as are routed.

    Raises:
        ArgumentError: no int; 0 where rows are routed, which means all of them in some of Transformer Engine's kernels.
    """
    if type(num_out_tokens) is not int or num_out_tokens < NOBODY or (num_out_tokens == 0 and routed > 0):
        raise ArgumentError(
            f"{where}: num_out_tokens",
            got=repr(num_out_tokens),
            accepted=f"-1 for all {routed} that are routed, or a positive int: with fewer the last ones are dropped, "
            "what is more is padded with zeros",
            todo="correct it",
        )
    return None if num_out_tokens == NOBODY else num_out_tokens


def check_probs(where: str, probs: object, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Probabilities of this shape on this device, in a dtype of activations.

    Raises:
        ArgumentTypeError: no tensor.
        ArgumentError: another shape, dtype or device.
    """
    probs = check_tensor(where, probs)
    if probs.shape == shape and probs.dtype in FLOATS and probs.device == device:
        return probs
    raise ArgumentError(
        where,
        got=f"shape {tuple(probs.shape)} of {probs.dtype} on {probs.device}",
        accepted=f"{shape} in {', '.join(map(str, FLOATS))} on {device}",
        todo="pass the probabilities that go with this map; float32 is best",
    )
