"""TransformerLayer on an NVIDIA GPU: hidden 4096, 32 heads, sequence 2048, batch 4, forward and backward.

    python benchmarks/gpu_transformer.py [--json FILE]

Times as in gpu_rows.py, beside a bf16 copy of 8192x8192; attention, for which torch's cuDNN kernel is wanted, also
alone. The bytes that a forward keeps for its backward are counted live, beside Transformer Engine's by formula
(tests/transformer_bytes.py). Last comes where the device's time goes in a step, kernel by kernel.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_rows import Group, Row, Table, device_us
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from transformer_bytes import LayerSize, activation_bytes, bytes_kept, weight_bytes

import te_hal
import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEVICE, BF16, COPIED = "cuda", torch.bfloat16, 8192
SEQUENCE, BATCH, HIDDEN, HEADS = 2048, 4, 4096, 32
#: Bytes of the random generator's state, which attention on a GPU keeps also without dropout.
GENERATOR = 64
#: us: goal, and Transformer Engine's time on another day.
TIMES = {"bf16": (17100.0, 17112.7), "delayed": (10900.0, 11044.3), "current": (11500.0, 11673.9)}


def recipes() -> dict[str, recipe.Recipe | None]:
    """What is timed, by name."""
    return {"bf16": None, "delayed": recipe.DelayedScaling(), "current": recipe.Float8CurrentScaling()}


class Layer:
    """A layer and its input."""

    def __init__(self, **arguments: Any) -> None:  # noqa: ANN401 - of TransformerLayer
        settings: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
        settings |= {"params_dtype": BF16, "device": DEVICE, **arguments}
        self.module = te.TransformerLayer(HIDDEN, 4 * HIDDEN, HEADS, **settings)
        self.x = torch.randn(SEQUENCE, BATCH, HIDDEN, device=DEVICE).to(BF16).requires_grad_()
        self.grad = torch.randn_like(self.x)

    def forward(self, chosen: recipe.Recipe | None) -> torch.Tensor:
        """Its result."""
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            result: torch.Tensor = self.module(self.x)
        return result

    def step(self, chosen: recipe.Recipe | None) -> Callable[[], None]:
        """Forward and backward."""

        def run() -> None:
            self.x.grad = None
            self.module.zero_grad(set_to_none=True)
            self.forward(chosen).backward(self.grad)

        return run


def layer_rows() -> Sequence[Row]:
    """The copy that goals are beside, then the layer under each recipe."""
    x, target = (torch.randn(COPIED, COPIED, device=DEVICE).to(BF16) for _ in range(2))
    fused, split = Layer(), Layer(fuse_qkv_params=False)
    return [
        Row("copy", lambda: target.copy_(x), None, 67.9),
        *(Row(f"layer {name}", fused.step(chosen), *TIMES[name]) for name, chosen in recipes().items()),
        *(Row(f"layer {name}, split weights", split.step(chosen)) for name, chosen in recipes().items()),
    ]


def attention_rows() -> Sequence[Row]:
    """Attention of the layer alone, in its layout; and of sequence 4096, for which there is a time to compare with."""
    channels = HIDDEN // HEADS

    def rows(length: int, forward: float | None, both: float | None) -> list[Row]:
        attention = te.DotProductAttention(HEADS, channels, attn_mask_type="causal")
        mixed = torch.randn(length, BATCH, HEADS, 3 * channels, device=DEVICE).to(BF16).requires_grad_()
        parts = mixed.chunk(3, dim=-1)
        grad = torch.randn(length, BATCH, HIDDEN, device=DEVICE).to(BF16)

        def backward() -> None:
            mixed.grad = None
            attention(*mixed.chunk(3, dim=-1)).backward(grad)

        print(f"sequence {length}: {attention.choice(*parts)}")
        return [
            Row(f"attention s{length} fwd", lambda: attention(*parts), None, forward),
            Row(f"attention s{length} fwd+bwd", backward, None, both),
        ]

    return [*rows(SEQUENCE, None, None), *rows(2 * SEQUENCE, 1016.0, 3873.2)]


def saved_bytes() -> dict[str, dict[str, int]]:
    """Bytes kept by a forward, live and by formula, printed."""
    size = LayerSize(SEQUENCE * BATCH, HIDDEN, 4 * HIDDEN, HEADS)
    found = {}
    print("\nkept for the backward, MiB: all, weights in FP8 among it, Transformer Engine's activations by formula")
    for name, chosen in recipes().items():
        layer = Layer()
        kept = bytes_kept(layer.module, lambda layer=layer, chosen=chosen: layer.forward(chosen))
        weights = weight_bytes(size) if chosen is not None else 0
        formula = activation_bytes(size, fp8=chosen is not None)
        found[name] = {"kept": kept, "weights": weights, "formula": formula}
        said = "" if kept - weights <= formula + GENERATOR else "  MORE"
        print(f"{name:8s} {kept / 2**20:9.1f} {weights / 2**20:9.1f} {formula / 2**20:9.1f}{said}", flush=True)
    return found


def show_kernels(name: str, chosen: recipe.Recipe | None, rounds: int = 5, shown: int = 22) -> None:
    """The device's time in a step by kernel, the longest first."""
    step = Layer().step(chosen)
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(rounds):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in found.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels) / rounds
    print(f"\nkernels of a step, {name}: {total:.0f} us on the device")
    for event in kernels[:shown]:
        each = event.self_device_time_total / rounds
        print(f"{each:9.1f} us {each / total:6.1%} {event.count / rounds:5.1f} x  {event.key[:100]}", flush=True)


def main() -> int:
    """Measure; 1 if a group failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    te_hal.set_backend("cuda")
    table = Table(options.json)
    table.add(Group("TransformerLayer, forward and backward", layer_rows, device_us))
    table.add(Group("attention", attention_rows, device_us))
    table.write(saved=saved_bytes())
    for name, chosen in recipes().items():
        show_kernels(name, chosen)
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
