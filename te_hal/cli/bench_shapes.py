"""What is timed: the sizes of common language models, and the scaled formats of their products, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_hal.schema.formats import ScalingMode

if TYPE_CHECKING:
    from collections.abc import Mapping

LAYOUTS = ("fprop", "dgrad", "wgrad")
#: Operands of each product of a linear layer.
OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}

#: What everything is held against: no quantization.
PLAIN = "bf16"

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder.

    Attributes:
        hidden: features between layers.
        ffn: features inside the gated MLP, of each half.
        heads: of the queries.
        kv_heads: of keys and values.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Out and in features of its linear layers."""
        kv = self.hidden // self.heads * self.kv_heads
        return {
            "qkv": (self.hidden + 2 * kv, self.hidden),
            "proj": (self.hidden, self.hidden),
            "fc1": (2 * self.ffn, self.hidden),
            "fc2": (self.hidden, self.ffn),
        }


#: Llama 3.2 1B, Llama 2 7B, Llama 3 70B.
MODELS = {
    "1B": Model(hidden=2048, ffn=8192, heads=32, kv_heads=8),
    "7B": Model(hidden=4096, ffn=11008, heads=32, kv_heads=32),
    "70B": Model(hidden=8192, ffn=28672, heads=64, kv_heads=8),
}


@dataclass(frozen=True)
class Scaled:
    """A way to quantize the operands of a linear layer.

    Attributes:
        formats: dtype and scaling mode of input, weight and grad_output.
    """

    formats: Mapping[str, tuple[torch.dtype, ScalingMode]]


def _all(dtype: torch.dtype, mode: ScalingMode) -> dict[str, tuple[torch.dtype, ScalingMode]]:
    return dict.fromkeys(("input", "weight", "grad_output"), (dtype, mode))


#: What recipes do: DelayedScaling and Float8CurrentScaling; Float8BlockScaling; MXFP8BlockScaling.
SCALED = {
    "per tensor": Scaled({**_all(_E4M3, ScalingMode.TENSOR), "grad_output": (_E5M2, ScalingMode.TENSOR)}),
    "blocks": Scaled({**_all(_E4M3, ScalingMode.BLOCK_1X128), "weight": (_E4M3, ScalingMode.BLOCK_128X128)}),
    "mxfp8": Scaled(_all(_E4M3, ScalingMode.MXFP8)),
}


@dataclass(frozen=True)
class Size:
    """How much is timed.

    Attributes:
        models: names in :data:`MODELS`.
        tokens: rows of every activation.
        widths: of the square layers for which FP8 is held against bf16, ascending.
        quick: one linear layer in every layout, and the widest forward.
    """

    models: tuple[str, ...]
    tokens: int
    widths: tuple[int, ...]
    quick: bool


def size_for(device: torch.device, models: tuple[str, ...], tokens: int | None, *, quick: bool) -> Size:
    """The default size for a device, with what the user asked for instead.

    Args:
        device: a CPU gets the 1B model and 64 or 256 tokens, any other device every model and 4096.
        models: asked for; none: the default.
        tokens: asked for; None: the default.
        quick: a tier of seconds.
    """
    slow = device.type == "cpu"
    if not models:
        models = ("1B",) if slow or quick else tuple(MODELS)
    widths = (256, 512, 1024, 2048) if slow else (512, 1024, 2048, 4096, 8192, 16384)
    return Size(models, tokens or ((64 if quick else 256) if slow else 4096), widths[:3] if quick else widths, quick)
