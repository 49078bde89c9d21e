"""Call every entry of a kernel library that launches work, a few times, with results and workspace left unwritten.

Usage: python call_entries.py LIBRARY [--runtime libcudart.so|libmusart.so] [--fill BYTE]

A kernel that reads what nobody wrote, or leaves a byte of a result unwritten, is seen by a device's checker
(`compute-sanitizer --tool initcheck`), since every result is read by a transpose afterwards. On the host it is seen by
running twice with other bytes in the unwritten memory (`--fill`): the digests that are printed must not change.
Uses nothing of torch, whose own kernels would be checked too.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import random
from pathlib import Path

from fuzz_entries import DeviceMemory, HostMemory
from native_table import Library, parameters

#: A shape with tails, and one whose rows are vectors; rows of both are whole blocks nowhere.
SHAPES = ((136, 264), (13, 72), (96, 1024))
FILLED = WORKSPACE = 1 << 20
BF16, E4M3, E5M2 = 3, 4, 5
TRANSPOSED, SAME = 0, 1
TENSOR, CURRENT, VECTORS, SQUARES, MXFP8 = 1, 2, 3, 4, 5
NVFP4, NVFP4_SQUARES, HADAMARD, MTFP8_VECTORS, MTFP8_SQUARES = 6, 7, 8, 9, 10
BY_CHANCE = 64


def _up(size: int, block: int) -> int:
    return -(-size // block)


def cast_calls(rows: int, cols: int) -> list[tuple[str, dict[str, object], dict[str, int]]]:
    """Casts: entry, arguments beside the defaults, and bytes of each result."""
    size = {"rowwise_data": rows * cols, "columnwise_data": rows * cols}
    one = {**size, "rowwise_scale_inv": 4, "columnwise_scale_inv": 4}
    found = {**one, "scale": 4, "amax": 4}
    calls: list[tuple[str, dict[str, object], dict[str, int]]] = []
    for order in (TRANSPOSED, SAME):
        calls.append(("quantize", {"columnwise_order": order}, one))
        calls.append(("quantize_current", {"columnwise_order": order}, found))
        for mode, down, across, width in ((VECTORS, 128, 128, 4), (MTFP8_VECTORS, 128, 128, 4), (MXFP8, 32, 32, 1)):
            strides = {"rowwise_scale_row_stride": _up(cols, across), "columnwise_scale_row_stride": cols}
            scales = {
                "rowwise_scale_inv": width * rows * _up(cols, across),
                "columnwise_scale_inv": width * _up(rows, down) * cols,
            }
            calls.append(("quantize_blocks", {"mode": mode, "columnwise_order": order, **strides}, {**size, **scales}))
    squares = {name: 4 * _up(rows, 128) * _up(cols, 128) for name in ("rowwise_scale_inv", "columnwise_scale_inv")}
    strides = {"rowwise_scale_row_stride": _up(cols, 128), "columnwise_scale_row_stride": _up(cols, 128)}
    modes = (SQUARES, MTFP8_SQUARES)
    calls += [("quantize_blocks", {"mode": mode, **strides}, {**size, **squares}) for mode in modes]
    calls.append(("dequantize", {"output_dtype": BF16}, {"output": 2 * rows * cols}))
    calls.append(("transpose", {"element_bytes": 2}, {"output": 2 * rows * cols}))
    calls.append(("amax", {}, {"amax": 4}))
    calls.append(("compute_scale", {}, {"scale": 4 * 5, "scale_inv": 4 * 5}))
    calls.append(("update_delayed_scale", {}, {}))
    return calls


def nvfp4_calls() -> list[tuple[str, dict[str, object], dict[str, int]]]:
    """Casts to and from NVFP4, of shapes without padding between the scales: it is never written."""
    calls: list[tuple[str, dict[str, object], dict[str, int]]] = []
    for rows, cols, copies in ((128, 256, ("rowwise", "columnwise")), (128, 192, ("rowwise",))):
        shape, halves = {"rows": rows, "cols": cols}, {"data": rows * cols // 2, "scale_inv": rows * cols // 16 + 4}
        sizes = {f"{copy}_{part}": size for copy in copies for part, size in halves.items()}
        left_out = {f"columnwise_{part}": 0 for part in halves if "columnwise" not in copies}
        for mode, flags in ((NVFP4, 0), (NVFP4, BY_CHANCE), (NVFP4_SQUARES, 0), (HADAMARD, 0), (HADAMARD, BY_CHANCE)):
            seed = {"seed_low": 5, "seed_high": 7} if flags else {}
            calls.append(("quantize_nvfp4", {"mode": mode, "flags": flags, **shape, **seed, **left_out}, sizes))
        for mode, copy in ((NVFP4, 0), (HADAMARD, 1)):
            decoded = {"mode": mode, "copy": copy, "output_dtype": BF16, **shape}
            calls.append(("dequantize_nvfp4", decoded, {"output": 2 * rows * cols}))
    return calls


def other_calls(rows: int, cols: int) -> list[tuple[str, dict[str, object], dict[str, int]]]:
    """Products, norms, softmax, activations, and what is fused with a cast."""
    size = rows * cols
    whole, cast = {"output": 2 * size}, {"rowwise_data": size, "columnwise_data": size}
    one = {**cast, "rowwise_scale_inv": 4, "columnwise_scale_inv": 4}
    statistics = {"mean": 4 * rows, "rstd": 4 * rows}
    gradients = {"grad_input": 2 * size, "grad_weight": 2 * cols, "grad_bias": 2 * cols}
    calls: list[tuple[str, dict[str, object], dict[str, int]]] = [
        ("bias_grad", {}, {"grad_bias": 2 * cols}),
        ("norm_fwd", {"output_dtype": BF16}, {**whole, **statistics}),
        ("norm_bwd", {}, gradients),
        ("softmax_fwd", {"output_dtype": BF16}, {"output": 2 * 2 * size}),
        ("softmax_bwd", {"output_dtype": BF16}, {"grad_input": 2 * 2 * size}),
        ("activation_fwd", {"output_dtype": BF16}, whole),
        ("activation_fwd", {"output_dtype": BF16, "activation": 11}, whole),
        ("activation_bwd", {}, {"grad_input": 2 * size}),
        ("activation_bwd", {"activation": 11}, {"grad_input": 2 * 2 * size}),
        ("bias_activation_fwd", {"output_dtype": BF16}, whole),
        ("bias_activation_bwd", {}, {"grad_input": 2 * size, "grad_bias": 2 * cols}),
        ("bias_residual", {"output_dtype": BF16}, whole),
    ]
    for layout, result in ((0, size), (1, rows * 40), (2, cols * 40)):
        for dtype, mode in ((BF16, 0), (E4M3, TENSOR)):
            operands = {"layout": layout, "a_dtype": dtype, "a_mode": mode, "b_dtype": dtype, "b_mode": mode}
            plain = {"a_scale_inv": 0, "b_scale_inv": 0} if mode == 0 else {}
            bias = {"bias": 0, "bias_dtype": 0} if layout else {}  # which fprop alone has
            calls.append(("gemm", {**operands, **plain, **bias, "out_dtype": BF16}, {"out": 2 * result}))
    for mode in (TENSOR, CURRENT):
        found = {**one, **({"scale": 4, "amax": 4} if mode == CURRENT else {})}
        epsilon = {"mode": mode}
        calls.append(("norm_quantize", epsilon, {**found, **statistics, "plain": 2 * size}))
        calls.append(("activation_quantize", epsilon, found))
        calls.append(("activation_bwd_quantize", epsilon, {**found, "grad_bias": 2 * cols}))
        calls.append(("bias_grad_quantize", epsilon, {**found, "grad_bias": 2 * cols}))
    return calls


def default(kind: str, name: str, rows: int, cols: int) -> float:
    """What an argument that is no address gets where a call says nothing."""
    given: dict[str, float] = {"rows": rows, "cols": cols, "count": 5, "length": 4, "fp8_max": 448.0, "norm": 1}
    given |= {"activation": 1, "causal": 1, "outer": 2, "inner": 1, "batches": 2, "queries": rows, "keys": cols}
    given |= {"m": rows, "n": cols, "k": 40, "window_left": -1, "window_right": -1, "value_for_inf": 3e38, "mode": 1}
    given |= {"workspace_size": WORKSPACE, "output_dtype": E4M3, "data_dtype": E5M2, "element_bytes": 1, "epsilon": 0.0}
    given |= {"rowwise_scale_col_stride": 1, "columnwise_scale_col_stride": 1}
    if name in given:
        return given[name]
    if name.endswith("dtype"):
        return BF16
    return 0.125 if kind == "double" and name == "scale" else 0


class Caller:
    """Makes calls and reads what they wrote."""

    def __init__(self, library: Library, memory: HostMemory | DeviceMemory, fill: int) -> None:
        self.library, self.memory, self.fill = library, memory, bytes([fill])
        self.entries = parameters()
        # Values about one as bf16, fp32 or FP8, whoever reads them.
        low = random.Random(1).randbytes(FILLED // 2)
        self.operand = bytes(byte for pair in zip(low, b"\x3f" * len(low), strict=True) for byte in pair)

    def unwritten(self, size: int) -> int:
        """Address of memory that nobody has written."""
        if isinstance(self.memory, HostMemory):
            return self.memory.allocate(self.fill * size)
        address = ctypes.c_size_t()
        self.memory.run("Malloc", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def call(self, entry: str, changes: dict[str, object], results: dict[str, int], shape: tuple[int, int]) -> str:
        """Make one call; the digest of its results."""
        addresses = {name: self.unwritten(size) for name, size in results.items()}
        arguments = []
        for kind, name in self.entries[entry]:
            if name in changes:
                value: object = changes[name]
            elif kind != "uintptr_t" or name in ("stream", "mask", "reduced_amax"):
                value = default(kind, name, *shape)
            elif name == "workspace":
                value = self.unwritten(WORKSPACE)
            else:
                value = addresses.get(name) or self.memory.allocate(self.operand)
            arguments.append(value)
        status = self.library.call(entry, *arguments)
        self.memory.wait()
        assert status == 0, (entry, changes, self.library.last_error())
        return hashlib.sha256(b"".join(self.read(addresses[n], size) for n, size in results.items())).hexdigest()[:16]

    def read(self, address: int, size: int) -> bytes:
        """The bytes of a result, after a kernel has read each."""
        turned = self.unwritten(size)
        status = self.library.call("transpose", address, turned, 1, size, 1, 0)
        assert status == 0, self.library.last_error()
        self.memory.wait()
        if isinstance(self.memory, HostMemory):
            return ctypes.string_at(turned, size)
        copied = ctypes.create_string_buffer(size)
        self.memory.run("Memcpy", copied, ctypes.c_size_t(turned), ctypes.c_size_t(size), 2)
        return copied.raw


def main() -> None:
    """Call all; print entry, what is special about the call, and the digest of its results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("--runtime", type=Path, default=None)
    parser.add_argument("--fill", type=int, default=0)
    options = parser.parse_args()
    library = Library(options.library)
    if options.runtime is None:
        library.configure_emulator(1, 32, -1)
    caller = Caller(library, DeviceMemory(options.runtime) if options.runtime else HostMemory(), options.fill)
    for shape in SHAPES:
        for entry, changes, results in cast_calls(*shape) + nvfp4_calls() + other_calls(*shape):
            print(shape, entry, changes, caller.call(entry, changes, results, shape))


if __name__ == "__main__":
    main()
