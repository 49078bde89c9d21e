"""A hundred thousand calls leave nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from te_hal import ops

if TYPE_CHECKING:
    from native_backends import NativeBackend

CALLS, ROUND = 100_000, 10_000
#: What the allocator may keep over what it had; one leaked tensor object a call would be 20 MB.
SLACK = 2 << 20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_hundred_thousand_calls_do_not_grow_the_process(native: NativeBackend) -> None:
    x, scale, amax = (native.put(t) for t in (torch.ones(4, 8), torch.ones(1), torch.zeros(1)))
    history, scales = native.put(torch.zeros(2, 1)), native.put(torch.ones(1))

    def calls(count: int) -> None:
        for _ in range(count // 5):
            storage = ops.quantize(x, scale, amax=amax, dtype=torch.float8_e4m3fn, columnwise=True)
            ops.dequantize(storage)
            ops.compute_scale(ops.amax(x), fp8_max=448.0)
            ops.update_delayed_scale(history, scales, fp8_max=448.0)

    with native.use():
        calls(2 * ROUND)
        before = resident_bytes()
        calls(CALLS)
        grown = resident_bytes() - before
    assert grown <= SLACK, grown
