"""Kernels and layers on an NVIDIA GPU through backend cuda, beside a bf16 copy of 8192x8192 in the same run.

    python benchmarks/gpu.py [--json FILE]

Each time is the median of events around one call, with 1 GiB written before it, so that nothing lies in the cache and
the host is ahead of the device. "goal" is in us; the copy took 67.9 us where the goals come from, and a miss is judged
by the ratio to the copy. "TE" are the times of Transformer Engine 2.20 on another day on a machine of this kind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import environment_line
import torch

import te_hal
import te_hal.modules as te
from te_hal import ops, recipe
from te_hal.ffi import codes
from te_hal.ffi.native import native_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Row = tuple[str, Callable[[], object], float | None, float | None]

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SIZE = 8192
COPY_OF_THE_GOALS = 67.9


def median_us(run: Callable[[], object], rounds: int = 30) -> float:
    """Median device time of one call."""
    flush = torch.empty(1 << 28, dtype=torch.int32, device="cuda")
    times = []
    for index in range(rounds + 5):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if index >= 5:  # noqa: PLR2004 - warm-up
            times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def wall_us(run: Callable[[], object], rounds: int = 300) -> float:
    """Median host time of one call, the device never waited for in between."""
    for _ in range(50):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
        if len(times) % 20 == 0:
            torch.cuda.synchronize()
    return statistics.median(times)


class Direct:
    """Entries of the kernel library that no op of te_hal calls yet."""

    def __init__(self) -> None:
        native = native_of("cuda")
        if native is None:
            msg = "backend cuda is not loaded"
            raise RuntimeError(msg)
        self.native, self.lib, self.api = native, native.lib, native.library.api
        self.stream = torch.cuda.current_stream().cuda_stream
        self.row = torch.empty(SIZE, SIZE, dtype=torch.uint8, device="cuda")
        self.column = torch.empty_like(self.row)
        self.scale = torch.full((1,), 20.0, device="cuda")
        self.amax, self.inverse = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
        self.rows = torch.empty(SIZE, device="cuda")
        self.means = torch.empty(SIZE, device="cuda")
        self.workspace = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")

    def checked(self, status: int) -> None:
        """Raise for a status."""
        if status:
            self.native.check(status, "benchmark")

    def current(self, x: torch.Tensor, *, columnwise: bool) -> Callable[[], None]:
        """amax, scale and cast in one entry."""
        space = (self.workspace.data_ptr(), self.workspace.numel())

        def run() -> None:
            self.checked(
                self.lib.api_quantize_current(
                    *(self.api, x.data_ptr(), codes.DTYPES[x.dtype], *x.shape, self.scale.data_ptr(), 0, 0.0, 0),
                    *self._copies(columnwise=columnwise),
                    *(codes.DTYPES[E4M3], *space, self.stream),
                )
            )

        return run

    def blocks(self, x: torch.Tensor, *, columnwise: bool, order: int) -> Callable[[], None]:
        """1x128 blocks."""
        groups = SIZE // 128
        row_scales = torch.empty(SIZE, groups, device="cuda")
        column_scales = torch.empty(groups, SIZE, device="cuda")
        column = (self.column.data_ptr(), column_scales.data_ptr(), SIZE, 1) if columnwise else (0, 0, 0, 0)

        def run() -> None:
            self.checked(
                self.lib.api_quantize_blocks(
                    *(self.api, x.data_ptr(), codes.DTYPES[x.dtype], *x.shape, 3, 0.0, 2),
                    *(self.row.data_ptr(), row_scales.data_ptr(), groups, 1, *column, order),
                    *(codes.DTYPES[E4M3], self.stream),
                )
            )

        return run

    def norm(self, x: torch.Tensor, weight: torch.Tensor, *, layer: bool, columnwise: bool) -> Callable[[], None]:
        """Norm and cast in one entry, scale given."""
        dtype = codes.DTYPES[x.dtype]
        bias = (weight.data_ptr(), dtype) if layer else (0, codes.NO_DTYPE)
        kind = codes.LAYERNORM if layer else codes.RMSNORM
        mean = self.means.data_ptr() if layer else 0
        space = (self.workspace.data_ptr(), self.workspace.numel())

        def run() -> None:
            self.checked(
                self.lib.api_norm_quantize(
                    *(self.api, kind, x.data_ptr(), dtype, *x.shape, weight.data_ptr(), dtype, *bias, 1e-5, 0, mean),
                    *(self.rows.data_ptr(), 0, dtype, 1, self.scale.data_ptr(), self.amax.data_ptr(), 0.0),
                    *self._copies(columnwise=columnwise),
                    *(codes.DTYPES[E4M3], *space, self.stream),
                )
            )

        return run

    def activation(self, x: torch.Tensor, kind: int, *, columnwise: bool) -> Callable[[], None]:
        """Activation and cast in one entry, scale given."""
        dtype = codes.DTYPES[x.dtype]
        space = (self.workspace.data_ptr(), self.workspace.numel())

        def run() -> None:
            self.checked(
                self.lib.api_activation_quantize(
                    *(self.api, kind, x.data_ptr(), dtype, SIZE, SIZE, 0.0, 0.0, 0.0, dtype, 1),
                    *(self.scale.data_ptr(), self.amax.data_ptr(), 0.0, 0),
                    *self._copies(columnwise=columnwise),
                    *(codes.DTYPES[E4M3], *space, self.stream),
                )
            )

        return run

    def _copies(self, *, columnwise: bool) -> tuple[int, ...]:
        inverse = self.inverse.data_ptr()
        column = self.column.data_ptr() if columnwise else 0
        return self.row.data_ptr(), column, 0, inverse, inverse if columnwise else 0


def kernel_rows(direct: Direct) -> list[Row]:
    """(work, call, goal, TE's time) of the memory-bound kernels."""
    x, y = (torch.randn(SIZE, SIZE, device="cuda").to(BF16) for _ in range(2))
    wide = torch.randn(SIZE, 2 * SIZE, device="cuda").to(BF16)
    weight, target = torch.randn(SIZE, device="cuda").to(BF16), torch.empty_like(x)
    scale, amax = direct.scale, direct.amax
    _, mean, rstd = ops.layernorm_fwd(x, weight, weight)
    scores = torch.randn(64, 2048, 2048, device="cuda").to(BF16)
    grads, probabilities = torch.randn_like(scores), ops.softmax_fwd(scores, causal="top_left")

    def cast(*, columnwise: bool) -> Callable[[], object]:
        return lambda: ops.quantize(x, scale, amax=amax, dtype=E4M3, columnwise=columnwise)

    return [
        ("copy", lambda: target.copy_(x), None, 67.9),
        ("quantize delayed row", cast(columnwise=False), 54, 53.6),
        ("quantize delayed row+col", cast(columnwise=True), 73, 79.1),
        ("quantize current row", direct.current(x, columnwise=False), 88, 92.5),
        ("quantize current row+col", direct.current(x, columnwise=True), 108, 117.8),
        ("block 1x128 row", direct.blocks(x, columnwise=False, order=1), 57, 66.6),
        ("block 1x128 row+col same", direct.blocks(x, columnwise=True, order=1), 78, None),
        ("block 1x128 row+col transposed", direct.blocks(x, columnwise=True, order=0), 82, 104.7),
        ("rmsnorm", lambda: ops.rmsnorm_fwd(x, weight), 71, 77.1),
        ("rmsnorm + fp8 row", direct.norm(x, weight, layer=False, columnwise=False), 58, 85.9),
        ("rmsnorm + fp8 row+col", direct.norm(x, weight, layer=False, columnwise=True), 92, 120.9),
        ("layernorm", lambda: ops.layernorm_fwd(x, weight, weight), 73, 86.2),
        ("layernorm + fp8 row", direct.norm(x, weight, layer=True, columnwise=False), 61, 101.6),
        ("layernorm + fp8 row+col", direct.norm(x, weight, layer=True, columnwise=True), 95, 137.0),
        ("layernorm bwd", lambda: ops.layernorm_bwd(y, x, mean, rstd, weight), 124, 206.6),
        ("rmsnorm bwd", lambda: ops.rmsnorm_bwd(y, x, rstd, weight), 114, 151.9),
        ("gelu + fp8 row", direct.activation(x, codes.ACTIVATION_KINDS["gelu"], columnwise=False), 58, 89.5),
        ("gelu + fp8 row+col", direct.activation(x, codes.ACTIVATION_KINDS["gelu"], columnwise=True), 76, 100.7),
        ("swiglu + fp8 row", direct.activation(wide, codes.ACTIVATION_KINDS["swiglu"], columnwise=False), 93, 115.7),
        (
            "swiglu + fp8 row+col",
            direct.activation(wide, codes.ACTIVATION_KINDS["swiglu"], columnwise=True),
            114,
            151.3,
        ),
        ("dswiglu bf16", lambda: ops.activation_bwd(y, wide, activation="swiglu"), 166, 162.8),
        ("dgelu bf16", lambda: ops.activation_bwd(y, x, activation="gelu"), 107, 106.5),
        ("causal softmax fwd", lambda: ops.softmax_fwd(scores, scale=0.1, causal="top_left"), 237, 365.4),
        ("causal softmax bwd", lambda: ops.softmax_bwd(grads, probabilities, scale=0.1), 315, 525.1),
    ]


def gemm_rows() -> list[Row]:
    """An FP8 gemm of 16384x4096x4096 and torch's own call."""
    a, b = (torch.randn(n, 4096, device="cuda").to(BF16) for n in (16384, 4096))
    one = torch.ones(1, device="cuda")
    qa, qb = (ops.quantize(x, one, dtype=E4M3) for x in (a, b))
    ta, tb = (q.rowwise_data.view(E4M3) for q in (qa, qb))
    return [
        ("torch._scaled_mm", lambda: torch._scaled_mm(ta, tb.t(), one, one, out_dtype=BF16), None, 427.9),  # noqa: SLF001
        ("gemm fp8 per tensor", lambda: ops.gemm(qa, qb), None, 427.9),
    ]


def layer(size: tuple[int, int, int], chosen: recipe.Recipe | None, *, backward: bool) -> Callable[[], None]:
    """A layer's forward, or forward and backward."""
    rows, wide, narrow = size
    module = te.Linear(wide, narrow, params_dtype=BF16, device="cuda")
    x = torch.randn(rows, wide, device="cuda").to(BF16).requires_grad_()
    grad = torch.randn(rows, narrow, device="cuda").to(BF16)

    def run() -> None:
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        if backward:
            x.grad = None
            module.zero_grad(set_to_none=True)
            y.backward(grad)

    return run


def layer_rows() -> list[Row]:
    """Layers at full size."""
    size = (16384, 4096, 4096)
    delayed, current = recipe.DelayedScaling(), recipe.Float8CurrentScaling()
    return [
        ("Linear fwd+bwd bf16", layer(size, None, backward=True), None, 2394.6),
        ("Linear fwd+bwd delayed", layer(size, delayed, backward=True), 1490, 1501.3),
        ("Linear fwd+bwd current", layer(size, current, backward=True), 1535, 1555.0),
    ]


def host_rows() -> list[Row]:
    """Layers so small that the host decides."""
    size = (128, 128, 128)
    delayed, current = recipe.DelayedScaling(), recipe.Float8CurrentScaling()
    plain = torch.nn.Linear(128, 128, device="cuda", dtype=BF16)
    x = torch.randn(128, 128, device="cuda").to(BF16)
    return [
        ("nn.Linear fwd", lambda: plain(x), None, 30.8),
        ("Linear(128,128) fwd delayed", layer(size, delayed, backward=False), 100, 287.9),
        ("Linear(128,128) fwd current", layer(size, current, backward=False), 190, 546.6),
        ("Linear(128,128) fwd+bwd delayed", layer(size, delayed, backward=True), 540, 1548.9),
    ]


def main() -> None:
    """Print the table, and write it where --json says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    te_hal.set_backend("cuda")
    ops.amax(torch.ones(1, device="cuda"))
    environment = environment_line.describe("cuda")
    print(environment)
    results: list[dict[str, Any]] = []
    copy = 0.0
    for measure, rows in (
        (median_us, kernel_rows(Direct())),
        (median_us, gemm_rows()),
        (median_us, layer_rows()),
        (wall_us, host_rows()),
    ):
        for work, run, goal, transformer_engine in rows:
            found = measure(run)
            copy = found if work == "copy" else copy
            ratio, wanted = found / copy, None if goal is None else goal / COPY_OF_THE_GOALS
            results.append({"work": work, "us": found, "of copy": ratio, "goal us": goal, "TE us": transformer_engine})
            said = "" if wanted is None else f"goal {goal:5.0f} us, {wanted:5.2f} x copy"
            print(f"{work:32s} {found:8.1f} us {ratio:6.2f} x copy   {said:30s} TE {transformer_engine}")
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
