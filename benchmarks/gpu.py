"""Kernels and layers on an NVIDIA GPU through backend cuda, beside a bf16 copy of 8192x8192 in the same run.

    python benchmarks/gpu.py [--json FILE]

Sizes are 8192x8192 bf16 where nothing else is said. gpu_rows.py says how it is measured, and what the columns are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_rows import Base, Group, Row, Table, device_us, host_us

import te_hal
import te_hal.modules as te
from te_hal import ops, recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
DEVICE, SIZE, SCORES, GEMM = "cuda", 8192, (64, 2048, 2048), (16384, 4096, 4096)


def some(*shape: int) -> torch.Tensor:
    """Normal values."""
    return torch.randn(*shape, device=DEVICE).to(BF16)


def scale_and_amax() -> tuple[torch.Tensor, torch.Tensor]:
    """As delayed scaling gives them to a cast."""
    return torch.full((1,), 20.0, device=DEVICE), torch.zeros(1, device=DEVICE)


def cast_rows() -> Sequence[Row]:
    """Casts of what is there."""
    x, (scale, amax) = some(SIZE, SIZE), scale_and_amax()
    target = torch.empty_like(x)

    def delayed(*, columnwise: bool) -> Callable[[], object]:
        return lambda: ops.quantize(x, scale, amax=amax, dtype=E4M3, columnwise=columnwise)

    def current(*, columnwise: bool) -> Callable[[], object]:
        return lambda: ops.quantize_current(x, dtype=E4M3, columnwise=columnwise)

    def blocks(mode: str, *, columnwise: bool, order: str = "transposed") -> Callable[[], object]:
        settings: dict[str, Any] = {"mode": mode, "columnwise": columnwise, "columnwise_order": order}
        power_of_2 = {"power_of_2": True} if mode.startswith("block") else {}
        return lambda: ops.quantize(x, dtype=E4M3, **settings, **power_of_2)

    def fp4(mode: str, **flags: Any) -> Callable[[], object]:  # noqa: ANN401 - flags of quantize
        return lambda: ops.quantize(x, dtype=torch.uint8, mode=mode, columnwise=True, **flags)

    return [
        Row("copy", lambda: target.copy_(x), None, 67.9),
        Row("quantize delayed row", delayed(columnwise=False), 54, 53.6),
        Row("quantize delayed row+col", delayed(columnwise=True), 73, 79.1),
        Row("quantize current row", current(columnwise=False), 88, 92.5),
        Row("quantize current row+col", current(columnwise=True), 108, 117.8),
        Row("block 1x128 row", blocks("block_1x128", columnwise=False), 57, 66.6),
        Row("block 1x128 row+col same", blocks("block_1x128", columnwise=True, order="same"), 78),
        Row("block 1x128 row+col transposed", blocks("block_1x128", columnwise=True), 82, 104.7),
        Row("block 128x128 row", blocks("block_128x128", columnwise=False), None, 57.1),
        Row("block 128x128 row+col", blocks("block_128x128", columnwise=True), None, 76.3),
        Row("mxfp8 row", blocks("mxfp8", columnwise=False)),
        Row("mxfp8 row+col same", blocks("mxfp8", columnwise=True, order="same")),
        Row("mtfp8 1x128 row", blocks("mtfp8_1x128", columnwise=False)),
        Row("mtfp8 1x128 row+col", blocks("mtfp8_1x128", columnwise=True, order="same")),
        Row("mtfp8 128x128 row+col", blocks("mtfp8_128x128", columnwise=True, order="same")),
        Row("nvfp4 row+col", fp4("nvfp4")),
        Row("nvfp4 16x16 row+col", fp4("nvfp4_16x16")),
        Row("nvfp4 hadamard row+col", fp4("nvfp4_hadamard")),
        Row("nvfp4 hadamard row+col by chance", fp4("nvfp4_hadamard", rounding_seed=7)),
    ]


def norm_rows() -> Sequence[Row]:
    """Norms, with and without the cast of their result; delayed scaling where nothing else is said."""
    x, grad, weight = some(SIZE, SIZE), some(SIZE, SIZE), some(SIZE)
    scale, amax = scale_and_amax()
    _, mean, rstd = ops.layernorm_fwd(x, weight, weight)

    def rms(*, columnwise: bool, **given: Any) -> Callable[[], object]:  # noqa: ANN401 - scale and amax, or none
        return lambda: ops.rmsnorm_quantize(x, weight, dtype=E4M3, columnwise=columnwise, **given)

    def layer(*, columnwise: bool, **given: Any) -> Callable[[], object]:  # noqa: ANN401 - as above
        return lambda: ops.layernorm_quantize(x, weight, weight, dtype=E4M3, columnwise=columnwise, **given)

    delayed = {"scale": scale, "amax": amax}
    return [
        Row("rmsnorm", lambda: ops.rmsnorm_fwd(x, weight), 71, 77.1),
        Row("rmsnorm + fp8 row", rms(columnwise=False, **delayed), 58, 85.9),
        Row("rmsnorm + fp8 row+col", rms(columnwise=True, **delayed), 92, 120.9),
        Row("rmsnorm + current row+col", rms(columnwise=True)),
        Row("layernorm", lambda: ops.layernorm_fwd(x, weight, weight), 73, 86.2),
        Row("layernorm + fp8 row", layer(columnwise=False, **delayed), 61, 101.6),
        Row("layernorm + fp8 row+col", layer(columnwise=True, **delayed), 95, 137.0),
        Row("layernorm + current row+col", layer(columnwise=True)),
        Row("layernorm bwd", lambda: ops.layernorm_bwd(grad, x, mean, rstd, weight), 124, 206.6),
        Row("rmsnorm bwd", lambda: ops.rmsnorm_bwd(grad, x, rstd, weight), 114, 151.9),
    ]


def activation_rows() -> Sequence[Row]:
    """Activations, their backward, and the gradient of a bias; delayed scaling where nothing else is said."""
    x, grad, wide = some(SIZE, SIZE), some(SIZE, SIZE), some(SIZE, 2 * SIZE)
    scale, amax = scale_and_amax()

    def cast(name: str, *, columnwise: bool, delayed: bool = True) -> Callable[[], object]:
        given: dict[str, Any] = {"scale": scale, "amax": amax} if delayed else {}
        of = wide if name == "swiglu" else x
        return lambda: ops.activation_quantize(of, activation=name, dtype=E4M3, columnwise=columnwise, **given)

    backward: dict[str, Any] = {"activation": "gelu", "bias_grad": True, "dtype": torch.float8_e5m2, "columnwise": True}
    return [
        Row("gelu + fp8 row", cast("gelu", columnwise=False), 58, 89.5),
        Row("gelu + fp8 row+col", cast("gelu", columnwise=True), 76, 100.7),
        Row("gelu + current row+col", cast("gelu", columnwise=True, delayed=False)),
        Row("swiglu + fp8 row", cast("swiglu", columnwise=False), 93, 115.7),
        Row("swiglu + fp8 row+col", cast("swiglu", columnwise=True), 114, 151.3),
        Row("dswiglu bf16", lambda: ops.activation_bwd(grad, wide, activation="swiglu"), 166, 162.8),
        Row("dgelu bf16", lambda: ops.activation_bwd(grad, x, activation="gelu"), 107, 106.5),
        Row("dgelu + dbias + fp8 row+col", lambda: ops.activation_bwd_quantize(grad, x, scale, amax=amax, **backward)),
        Row("dgelu + dbias + current row+col", lambda: ops.activation_bwd_quantize(grad, x, **backward)),
        Row(
            "dbias + fp8 row+col",
            lambda: ops.bias_grad_quantize(grad, scale, amax=amax, dtype=torch.float8_e5m2, columnwise=True),
        ),
    ]


def softmax_rows() -> Sequence[Row]:
    """64 x 2048 x 2048."""
    scores = some(*SCORES)
    grads, probabilities = torch.randn_like(scores), ops.softmax_fwd(scores, causal="top_left")

    def backward() -> object:
        return ops.softmax_bwd(grads, probabilities, scale=0.1, causal="top_left")

    return [
        Row("causal softmax fwd", lambda: ops.softmax_fwd(scores, scale=0.1, causal="top_left"), 237, 365.4),
        Row("causal softmax bwd", backward, 315, 525.1),
    ]


def gemm_rows() -> Sequence[Row]:
    """16384x4096x4096 with a scale per tensor."""
    rows, columns, contraction = GEMM
    one = torch.ones(1, device=DEVICE)
    a, b = (ops.quantize(some(n, contraction), one, dtype=E4M3) for n in (rows, columns))
    left, right = (storage.rowwise_data.view(E4M3) for storage in (a, b))
    return [
        Row("torch._scaled_mm", lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=BF16)),  # noqa: SLF001
        Row("gemm fp8 per tensor", lambda: ops.gemm(a, b), 1.02, 427.9),
    ]


def block_gemm_rows() -> Sequence[Row]:
    """16384x4096x4096 with scales per 1x128 and 128x128 block."""
    rows, columns, contraction = GEMM
    a, b = (
        ops.quantize(some(n, contraction), dtype=E4M3, mode=mode, columnwise=False, power_of_2=True)
        for n, mode in ((rows, "block_1x128"), (columns, "block_128x128"))
    )
    left, right = (storage.rowwise_data.view(E4M3) for storage in (a, b))
    of_left, of_right = a.rowwise_scale_inv.t()[:rows], b.rowwise_scale_inv.t()
    functional: Any = torch.nn.functional
    kinds = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128

    def by_torch() -> object:
        return functional.scaled_mm(left, right.t(), of_left, kinds[0], of_right, kinds[1], output_dtype=BF16)

    return [
        Row("torch scaled_mm with blocks", by_torch),
        Row("gemm fp8 with blocks", lambda: ops.gemm(a, b), 1.02, 483.3),
    ]


def layer(size: tuple[int, int, int], chosen: recipe.Recipe | None, *, backward: bool) -> Callable[[], None]:
    """A Linear's forward, or forward and backward."""
    rows, wide, narrow = size
    module = te.Linear(wide, narrow, params_dtype=BF16, device=DEVICE)
    x, grad = some(rows, wide).requires_grad_(), some(rows, narrow)

    def run() -> None:
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        if backward:
            x.grad = None
            module.zero_grad(set_to_none=True)
            y.backward(grad)

    return run


def layer_rows() -> Sequence[Row]:
    """Linear 16384x4096x4096."""
    delayed, current = recipe.DelayedScaling(), recipe.Float8CurrentScaling()
    return [
        Row("Linear fwd+bwd bf16", layer(GEMM, None, backward=True), None, 2394.6),
        Row("Linear fwd+bwd delayed", layer(GEMM, delayed, backward=True), 1490, 1501.3),
        Row("Linear fwd+bwd current", layer(GEMM, current, backward=True), 1535, 1555.0),
    ]


def host_rows(*, backward: bool) -> Sequence[Row]:
    """Linear(128, 128), so small that the host decides."""
    size = (128, 128, 128)
    delayed, current = recipe.DelayedScaling(), recipe.Float8CurrentScaling()
    plain = torch.nn.Linear(128, 128, device=DEVICE, dtype=BF16)
    x, grad = some(128, 128).requires_grad_(), some(128, 128)
    if not backward:
        return [
            Row("nn.Linear fwd", lambda: plain(x), None, 30.8),
            Row("Linear(128,128) fwd bf16", layer(size, None, backward=False), None, 181.1),
            Row("Linear(128,128) fwd delayed", layer(size, delayed, backward=False), 100, 287.9),
            Row("Linear(128,128) fwd current", layer(size, current, backward=False), 190, 546.6),
        ]

    def both() -> None:
        x.grad = None
        plain.zero_grad(set_to_none=True)
        plain(x).backward(grad)

    return [
        Row("nn.Linear fwd+bwd", both, None, 335.0),
        Row("Linear(128,128) fwd+bwd bf16", layer(size, None, backward=True), None, 910.6),
        Row("Linear(128,128) fwd+bwd delayed", layer(size, delayed, backward=True), 540, 1548.9),
        Row("Linear(128,128) fwd+bwd current", layer(size, current, backward=True), None, 1565.2),
    ]


GROUPS = [
    Group("casts", cast_rows, device_us),
    Group("norms", norm_rows, device_us),
    Group("activations", activation_rows, device_us),
    Group("softmax", softmax_rows, device_us),
    Group("gemm per tensor", gemm_rows, device_us, Base("torch._scaled_mm", 1.0)),
    Group("gemm with blocks", block_gemm_rows, device_us, Base("torch scaled_mm with blocks", 1.0)),
    Group("layers", layer_rows, device_us),
    Group("host, forward", lambda: host_rows(backward=False), host_us, Base("nn.Linear fwd", 30.8)),
    Group("host, forward and backward", lambda: host_rows(backward=True), host_us, Base("nn.Linear fwd+bwd", 335.0)),
]


def main() -> int:
    """Measure every group; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    te_hal.set_backend("cuda")
    table = Table(options.json)
    for group in GROUPS:
        table.add(group)
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
