"""What is added to the scores before the softmax: a tensor of the caller's, or ALiBi."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from te_hal.modules.attention.visibility import query_places
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS

#: Transformer Engine's names.
NO_BIAS, PRE_SCALE, POST_SCALE, ALIBI = TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class Bias(NamedTuple):
    """A bias of one call.

    Attributes:
        type: of TYPES.
        tensor: the caller's, broadcasts to ``[b, h, sq, sk]``; with ALiBi fp32 slopes ``[h]`` or ``[b, h]``; or None.
    """

    type: str
    tensor: torch.Tensor | None

    def added(self, offset: int | torch.Tensor, queries: int, keys: int) -> torch.Tensor | None:
        """What is added, broadcasts to ``[b, h, sq, sk]``: the caller's tensor, or ``-slope * distance`` in fp32.

        Args:
            offset: the place of the first query among the keys; ``[b]`` where every sequence has its own.
            queries: sq.
            keys: sk.
        """
        if self.type != ALIBI or self.tensor is None:
            return self.tensor
        device = self.tensor.device
        distance = (query_places(offset, queries, device) - torch.arange(keys, device=device)).abs()
        return self.tensor.view(-1, self.tensor.shape[-1], 1, 1) * distance.neg()


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """``[heads]``, fp32: ``2 ** (-8 i / n)`` for i = 1 to n, n the largest power of two up to ``heads``.

    Heads beyond take every other slope of ``2 n`` heads, from the first on.
    """
    whole = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (heads - whole), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def check_bias(
    where: str, type_: object, bias: object, slopes: object, scores: tuple[int, int, int, int], device: torch.device
) -> Bias:
    """The bias of a call.

    Args:
        where: the module, for messages.
        type_: of TYPES.
        bias: for the types that add a tensor: one that broadcasts to ``scores``.
        slopes: for ALiBi: fp32 ``[h]`` or ``[b, h]``; None: :func:`alibi_slopes`.
        scores: ``(b, h, sq, sk)``.
        device: of the queries.

    Raises:
        ArgumentError: an unknown type; a tensor that is missing, too much, or does not fit.
    """
    if type_ not in TYPES:
        accepted = ", ".join(repr(name) for name in TYPES)
        raise ArgumentError(f"{where}: core_attention_bias_type", got=repr(type_), accepted=accepted, todo="correct it")
    if slopes is not None and type_ != ALIBI:
        raise _too_much(where, "alibi_slopes", type_, "'alibi'")
    if type_ in (PRE_SCALE, POST_SCALE):
        return Bias(str(type_), _check_tensor(where, bias, scores, device))
    if bias is not None:
        raise _too_much(where, "core_attention_bias", type_, "'pre_scale_bias' or 'post_scale_bias'")
    if type_ == NO_BIAS:
        return Bias(NO_BIAS, None)
    if slopes is None:
        return Bias(ALIBI, alibi_slopes(scores[1], device))
    return Bias(ALIBI, _check_slopes(where, slopes, scores, device))


def _too_much(where: str, name: str, type_: object, wanted: str) -> ArgumentError:
    return ArgumentError(
        f"{where}: {name}",
        got=f"a value under core_attention_bias_type={type_!r}",
        accepted="None: nothing would read it",
        todo=f"leave it out, or pass core_attention_bias_type={wanted}",
    )


def _check_tensor(where: str, bias: object, scores: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    if (
        isinstance(bias, torch.Tensor)
        and bias.dtype in FLOATS
        and bias.device == device
        and bias.dim() == len(scores)
        and all(size in (1, full) for size, full in zip(bias.shape, scores, strict=True))
    ):
        return bias
    raise ArgumentError(
        f"{where}: core_attention_bias",
        got=_described(bias),
        accepted=f"fp32, fp16 or bf16 on {device}, each size 1 or that of {scores}",
        todo="expand it to four dimensions: batch, heads, queries, keys",
    )


def _check_slopes(where: str, slopes: object, scores: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    batch, heads = scores[:2]
    learned = isinstance(slopes, torch.Tensor) and slopes.requires_grad
    if (
        isinstance(slopes, torch.Tensor)
        and slopes.dtype is torch.float32
        and slopes.device == device
        and tuple(slopes.shape) in ((heads,), (batch, heads))
        and not learned
    ):
        return slopes
    needs = " that needs a gradient" if learned else ""
    raise ArgumentError(
        f"{where}: alibi_slopes",
        got=_described(slopes) + needs,
        accepted=f"fp32 on {device}, ({heads},) or ({batch}, {heads}), without a gradient",
        todo='correct it; slopes that are trained can be a core_attention_bias of type "post_scale_bias"',
    )


def _described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else repr(value)
