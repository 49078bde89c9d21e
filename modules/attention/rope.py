"""Rotary position embedding: angles by position and channel, and the rotation of queries and keys by them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.arguments import check_size, check_tensor
from te_hal.modules.attention.layout import check_format
from te_hal.modules.attention.rope_angles import checked_part, chosen_angles
from te_hal.modules.device import parameter_device
from te_hal.modules.once import once
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization.quantized_tensor import dequantized
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles for :func:`apply_rotary_pos_emb`: position times ``rotary_base ** (-2 i / dim)``.

    Args:
        dim: channels of a head.
        rotary_percent: share of them that is rotated.
        seq_len_interpolation_factor: positions are divided by it; None: not.
        pretrained_max_position_embeddings: with the factor: a sequence longer than their product is squeezed into this
            many positions instead.
        rotary_base: of the powers.
        interleaved: the angle of a pair stands twice side by side, instead of in both halves.

    Attributes:
        inv_freq: ``[rotated / 2]``, a buffer in the state dict. It stays fp32 when the module's dtype changes.

    Raises:
        ArgumentError: no positive sizes, or an odd number of channels to rotate.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        check_flags(kind, {"interleaved": interleaved})
        check_size(f"{kind}: dim", dim)
        for name, number in {
            "rotary_percent": rotary_percent,
            "seq_len_interpolation_factor": seq_len_interpolation_factor,
            "pretrained_max_position_embeddings": pretrained_max_position_embeddings,
            "rotary_base": rotary_base,
        }.items():
            if number is not None or name.startswith("rotary"):
                _check_positive(f"{kind}: {name}", number, most=1.0 if name == "rotary_percent" else math.inf)
        self.rotated = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if self.rotated < 2 or self.rotated % 2:  # noqa: PLR2004 - a pair
            raise ArgumentError(
                kind,
                got=f"{self.rotated} channels to rotate, by dim={dim} and rotary_percent={rotary_percent}",
                accepted="an even number of at least 2: channels are rotated in pairs",
                todo="correct dim or rotary_percent",
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = float(rotary_base)
        self.interleaved = interleaved
        self.register_buffer("inv_freq", self._powers(parameter_device(None)))

    def _powers(self, device: torch.device) -> torch.Tensor:
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=device) / self.rotated
        return 1.0 / (self.rotary_base**exponents)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryPositionEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.dtype is not torch.float32:  # 8 bits of a power are no angle at position 1000
            self.inv_freq = self._powers(self.inv_freq.device)
        return self

    def forward(self, max_seq_len: int | torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Angles of the positions ``offset`` to ``offset + max_seq_len - 1``.

        Args:
            max_seq_len: how many positions; a tensor with one integer, as ``cu_seqlens[-1]`` is, will do.
            offset: the first one.

        Returns:
            ``[max_seq_len, 1, 1, rotated]``, fp32, radians, inside ``torch.autocast`` too.

        Raises:
            ArgumentError: no positive ``max_seq_len``, or an ``offset`` that is no int.
        """
        kind = type(self).__name__
        given = (
            max_seq_len.item() if isinstance(max_seq_len, torch.Tensor) and max_seq_len.numel() == 1 else max_seq_len
        )
        length = check_size(f"{kind}: max_seq_len", given)
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise ArgumentError(f"{kind}: offset", got=repr(offset), accepted="an int", todo="correct it")
        device = self.inv_freq.device
        positions = torch.arange(length, dtype=torch.float32, device=device) + offset
        positions = positions * self._squeeze(length)
        angles = positions.unsqueeze(1) * self.inv_freq
        both = torch.stack((angles, angles), -1) if self.interleaved else torch.cat((angles, angles), -1)
        return both.reshape(length, 1, 1, self.rotated)

    def _squeeze(self, max_seq_len: int) -> float:
        factor, pretrained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is None:
            return 1.0
        if pretrained is not None and max_seq_len > pretrained * factor:
            return 1.0 / (max_seq_len / pretrained)
        return 1.0 / factor


@run_eagerly
def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate pairs of channels by the angles of their position; differentiable once in ``t``.

    A pair is channels ``i`` and ``i + rotated / 2``, or neighbours where ``interleaved``. Computed in fp32 (fp64 for
    fp64), rounded once.

    Args:
        t: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]`` by ``tensor_format``.
        freqs: ``[s2, 1, 1, rotated]``, s2 at least the longest sequence, rotated <= d and even; channels beyond pass
            through. No gradient.
        tensor_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        start_positions: ``[b]``, ints from 0 to s2 - s: the row of ``freqs`` at which each sequence starts; None: 0.
            On an accelerator the values are checked by torch's index_select alone.
        interleaved: which channels are a pair.
        fused: accepted, for callers written for Transformer Engine: both values give what its fused kernel computes.
        cu_seqlens: for "thd", int32 or int64 ``[b + 1]``: where each sequence begins, then the end of the last; tokens
            behind it pass through.
        cp_size: over how many processes each sequence is spread, in 2 ``cp_size`` equal pieces; ``t`` has two of
            each, while ``freqs`` and ``cu_seqlens`` are those of whole sequences. Not with ``start_positions``.
        cp_rank: which ones: pieces ``cp_rank`` and ``2 cp_size - 1 - cp_rank``.

    Returns:
        A new tensor of t's shape and dtype.

    Raises:
        ArgumentError, ArgumentTypeError: shapes, dtypes, devices or lengths that do not fit.
    """
    where = "apply_rotary_pos_emb"
    check_flags(where, {"interleaved": interleaved, "fused": fused})
    check_format(f"{where}: tensor_format", tensor_format)
    _check_tensors(where, t, freqs)
    part = checked_part(where, cp_size, cp_rank, start_positions)
    angles = chosen_angles(where, t, freqs.detach(), tensor_format, start_positions, cu_seqlens, part)
    rotated: torch.Tensor = _Rotation.apply(dequantized(t), angles, interleaved)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """Rotate; saves the angles alone."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(angles)
        ctx.interleaved = interleaved
        return _rotate(t, angles, interleaved, back=False)

    @staticmethod
    @run_eagerly
    @once(lambda _: "apply_rotary_pos_emb")
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        (angles,) = ctx.saved_tensors
        return _rotate(dequantized(grad_output), angles, ctx.interleaved, back=True), None, None


def _check_positive(where: str, number: object, *, most: float) -> None:
    known = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not known or not 0 < number <= most or number == math.inf:  # type: ignore[operator] # a number
        accepted = "a positive number" if most == math.inf else f"a positive number up to {most}"
        raise ArgumentError(where, got=repr(number), accepted=accepted, todo="correct it")


def _rotate(t: torch.Tensor, angles: torch.Tensor, interleaved: bool, *, back: bool) -> torch.Tensor:
    """The rotation, or its transpose, which is its inverse where both channels of a pair have one angle."""
    rotated = angles.shape[-1]
    computed = angles.to(torch.promote_types(t.dtype, torch.float32))
    (cos_first, cos_second), (sin_first, sin_second) = (
        _pairs(values, interleaved) for values in (computed.cos(), computed.sin())
    )
    if back:
        sin_first, sin_second = -sin_second, -sin_first
    result = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    first, second = _pairs(t[..., :rotated], interleaved)
    to_first, to_second = _pairs(result[..., :rotated], interleaved)
    to_first.copy_(first * cos_first - second * sin_first)
    to_second.copy_(second * cos_second + first * sin_second)
    if rotated < t.shape[-1]:
        result[..., rotated:].copy_(t[..., rotated:])
    return result


def _pairs(values: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of first and second channels."""
    if interleaved:
        return values[..., 0::2], values[..., 1::2]
    half = values.shape[-1] // 2
    return values[..., :half], values[..., half:]


def _check_tensors(where: str, t: object, freqs: object) -> None:
    for name, given in (("t", t), ("freqs", freqs)):
        value = check_tensor(f"{where}: {name}", given)
        if value.dtype not in (*FLOATS, torch.float64):
            accepted = "torch.float32, torch.bfloat16, torch.float16 (torch.float64 for checks)"
            raise ArgumentError(f"{where}: {name}", got=str(value.dtype), accepted=accepted, todo="cast it")
