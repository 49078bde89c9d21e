"""Call every entry of a kernel library with arguments from the edges of what they may be, for a while.

Usage: python fuzz_entries.py LIBRARY SECONDS SEED PROGRESS_FILE [--runtime libcudart.so|libmusart.so]

Meant for a library built with a sanitizer. Buffers are larger than any size that is offered and not refused, so that
nothing but a defect can touch memory outside them. The file gets "SEED NUMBER" before every call: to see a call that
ended the process, run again with that seed and `--only NUMBER`. With a device's runtime the buffers are its memory and
every call is waited for; made for that device's own checkers, it imports nothing that uses the device.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import time
from pathlib import Path

from native_table import Library, parameters, struct

MOST = 40  # of a size that is carried out
BUFFER = 1 << 20  # holds MOST * MOST elements with every stride that is offered, and room behind them
BUFFERS = 30
SIZES = (0, 1, 2, 7, 8, 16, 31, 32, 33, MOST)
SIZES_OF_BLOCKS = (0, 16, 32)  # NVFP4 takes multiples of 16 alone
SIZES_OF_FOUR = (0, 1, 2, 7, 8, 16, 17, 20)  # for entries whose tensors have four sizes
HOSTILE_SIZES = (-1, -(2**63), 2**60, 2**61, 2**63 - 1)
OPTIONAL = (
    "amax",
    "rowwise_data",
    "columnwise_data",
    "rowwise_scale_inv",
    "columnwise_scale_inv",
    "reduced_amax",
    "mask",
)
NUMBERS = (0.0, 1.0, -1.0, 1e-5, 448.0, 57344.0, 7.0, 1e300, -1e300, float("inf"), float("-inf"), float("nan"))
LAST_CODE = {
    "op": 21,
    "kind": 12,
    "dtype": 6,
    "mode": 10,
    "order": 1,
    "copy": 2,
    "layout": 2,
    "norm": 2,
    "activation": 12,
    "causal": 2,
    "algo": 1,
    "groups": 4,
}


def last_code(name: str, other: int) -> int:
    """The last code of what an argument or a field is named after; `other` where it is no code."""
    return next((value for word, value in LAST_CODE.items() if name.endswith(word)), other)


class HostMemory:
    """Buffers of this process."""

    def __init__(self) -> None:
        self.kept: list[ctypes.Array[ctypes.c_char]] = []

    def allocate(self, content: bytes) -> int:
        """Address of a new buffer that holds `content`, a multiple of 16."""
        self.kept.append(ctypes.create_string_buffer(len(content) + 16))
        address = ctypes.addressof(self.kept[-1])
        address += -address % 16
        ctypes.memmove(address, content, len(content))
        return address

    def wait(self) -> None:
        """Nothing is pending."""


class DeviceMemory:
    """Buffers of the current device, by way of its runtime library."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = ctypes.CDLL(str(runtime))
        self.prefix = "musa" if "musa" in runtime.name else "cuda"

    def allocate(self, content: bytes) -> int:
        """Address of new device memory that holds `content`."""
        address = ctypes.c_size_t()
        self.run("Malloc", ctypes.byref(address), ctypes.c_size_t(len(content)))
        self.run("Memcpy", address, content, ctypes.c_size_t(len(content)), 1)
        return address.value

    def wait(self) -> None:
        """Wait for the device; an error of a kernel ends the run."""
        self.run("DeviceSynchronize")

    def run(self, name: str, *arguments: object) -> None:
        """Call the runtime; anything but success ends the run."""
        status = getattr(self.runtime, self.prefix + name)(*arguments)
        assert status == 0, (name, status)


class Caller:
    """Makes calls from a seed; the same number gives the same call."""

    def __init__(self, library: Library, seed: int, memory: HostMemory | DeviceMemory) -> None:
        self.library, self.seed, self.memory = library, seed, memory
        self.entries = {n: p for n, p in parameters().items() if n not in ("last_error", "configure_emulator")}
        content = random.Random(seed).randbytes(BUFFER)
        self.addresses = [memory.allocate(content) for _ in range(BUFFERS)]

    def call(self, number: int) -> tuple[str, int]:
        """Make call `number`; the entry and its status."""
        self.random = random.Random(self.seed * 1_000_003 + number)
        self.hostile = self.random.choice((0.0, 0.0, 0.02, 0.1))
        self.tame = self.hostile == 0.0 and self.random.random() < 0.7  # to get past the checks
        entry = self.random.choice(list(self.entries))
        self.unused = self.addresses[:]
        self.random.shuffle(self.unused)
        self.dtype = self.random.randint(1, 3)
        self.sizes = SIZES_OF_FOUR if entry.startswith("softmax") else SIZES
        self.copies = self.random.choice((("rowwise",), ("columnwise",), ("rowwise", "columnwise")))
        self.fp4 = entry.endswith("nvfp4") or (entry == "gemm" and self.tame and self.random.random() < 0.2)
        if self.tame and self.fp4:
            self.sizes = SIZES_OF_BLOCKS
        self.by_chance = self.random.random() < 0.5
        self.quantized = {"a": self.random.random() < 0.5, "b": self.random.random() < 0.5}  # operands of a gemm
        self.entry = entry
        self.given: dict[str, float] = {}
        for kind, name in self.entries[entry]:
            self.given[name] = self.argument(entry, kind, name)
        arguments = list(self.given.values())
        status = self.library.call(entry, *arguments)
        self.memory.wait()
        return entry, status

    def argument(self, entry: str, kind: str, name: str) -> float:
        """One value: in range most of the time."""
        if name == "stream":
            return 0
        if "*" in kind:
            return self.host_array(entry, kind, name)
        if kind == "uintptr_t":
            return self.address(name)
        if kind == "double":
            return self.number(name)
        if kind == "uint32_t":
            return self.seed_half() if name.startswith("seed") else self.flags()
        return self.size(name) if kind == "int64_t" else self.code(name)

    def is_hostile(self, factor: int = 1) -> bool:
        return self.random.random() < self.hostile * factor

    def address(self, name: str) -> int:
        if self.is_hostile():
            return self.random.choice((0, 1, 2**64 - 1, 2**64 - 64, self.addresses[0]))
        copy = name.split("_", maxsplit=1)[0]
        if self.tame and copy in ("rowwise", "columnwise"):
            return self.unused.pop() if copy in self.copies else 0
        if self.tame and self.entry == "gemm" and name.endswith("scale_inv"):
            return self.unused.pop() if self.quantized[copy] else 0
        if self.random.random() < (0.3 if name in OPTIONAL else 0.0 if self.tame else 0.1):
            return 0
        return self.unused.pop() + self.random.choice((0, 0, 0, 4, 8, 12) if self.tame else (0, 0, 2, 4, 1))

    def number(self, name: str) -> float:
        if self.is_hostile(3):
            return self.random.choice(NUMBERS)
        if self.tame and name in ("fp8_max", "value_for_inf"):
            return self.random.choice((1.0, 448.0, 1e-5))
        return 0.0 if self.tame else self.random.choice((0.0, 1.0, 448.0, 1e-5))

    def flags(self) -> int:
        if self.is_hostile():
            return self.random.getrandbits(32)
        if self.tame and self.fp4 and self.by_chance:
            return {"quantize_nvfp4": 64, "dequantize_nvfp4": 128}.get(self.entry, 0)
        return 0 if self.tame else self.random.choice((0, 1, 2, 4, 64, 128))

    def seed_half(self) -> int:
        return self.random.getrandbits(32) if self.by_chance or self.is_hostile() else 0

    def size(self, name: str) -> int:
        if name == "workspace_size":
            return BUFFER // 2 if self.tame else self.random.choice((0, 2047, BUFFER // 2))
        if self.is_hostile():
            return self.random.choice(HOSTILE_SIZES)
        if self.tame and name.endswith("stride") and self.has_no_strides(name):
            return 0
        return self.random.choice((-1, 0, 3)) if name.startswith("window") else self.random.choice(self.sizes)

    def has_no_strides(self, name: str) -> bool:
        """Whether what was given before, a mode or a mask, has none."""
        if name.startswith("mask"):
            return self.given["mask"] == 0
        mode = self.given.get(f"{name[:2]}mode", self.given.get("mode"))
        return self.fp4 or (self.entry in ("gemm", "dequantize") and mode in (0, 1, 2))

    def code(self, name: str) -> int:
        if self.is_hostile():
            return self.random.choice((-1, 13, 99, 2**31 - 1, -(2**31)))
        if self.tame and self.entry == "gemm" and name[:2] in ("a_", "b_"):
            return self.operand_code(name[2:], self.quantized[name[0]])
        if self.tame and self.entry == "quantize_blocks" and name == "mode":
            return self.random.choice((3, 4, 5, 9, 10))
        if self.tame and self.entry.endswith("nvfp4"):
            return {"mode": self.random.randint(6, 8), "copy": self.random.randint(0, 1)}.get(name, self.dtype)
        if name.endswith("dtype"):
            fp8 = name in ("output_dtype", "data_dtype") and self.random.random() < 0.6
            return self.random.choice((4, 5)) if fp8 else self.random.choice((self.dtype, self.random.randint(0, 6)))
        return self.random.randint(0, last_code(name, 4))

    def operand_code(self, name: str, quantized: bool) -> int:
        """A code of a gemm's operand, plain or quantized as a whole."""
        choices = {"dtype": (4, 5), "copy": (0, 1, 2), "mode": (1, 2, 3, 4, 5, 9, 10)}[name]
        if self.fp4:
            choices = {"dtype": (6,), "copy": (0, 1), "mode": (6, 7, 8)}[name]
        return self.random.choice(choices) if quantized else self.dtype if name == "dtype" else 0

    def host_array(self, entry: str, kind: str, name: str) -> int:
        """Memory of the host that an entry reads or writes through a pointer."""
        if self.is_hostile():
            return 0
        if entry == "supports":
            call_type = struct("te_hal_call")
            call = call_type.from_buffer_copy(self.random.randbytes(ctypes.sizeof(call_type)))
            for field, field_type in call_type._fields_:
                if not self.is_hostile(3):
                    setattr(call, field, self.random.randint(0, last_code(field, 3)))
                del field_type
            call.struct_size = self.random.choice((0, 4, 8, 40, ctypes.sizeof(call)))
            self.kept = call
        elif entry == "device_info":
            info_type = struct("te_hal_device_info")
            self.kept = info_type(struct_size=self.random.choice((0, 3, 4, 17, ctypes.sizeof(info_type))))
        elif "uintptr_t" in kind:
            apart = [self.unused.pop() for _ in range(LAST_CODE["groups"])]
            others = self.random.choices(self.addresses, k=MOST - len(apart))
            self.kept = (ctypes.c_size_t * MOST)(*apart, *others)
        elif "double" in kind:
            self.kept = (ctypes.c_double * MOST)(*(448.0 for _ in range(MOST)))
        else:
            self.kept = (ctypes.c_int64 * MOST)(*(self.size(name) for _ in range(MOST)))
        self.keep = [*getattr(self, "keep", [])[-8:], self.kept]
        return ctypes.addressof(self.kept)


def check(library: Library, entry: str, status: int) -> None:
    """A call ends in a documented status, and a failed one in a sentence that begins with its entry's name."""
    if entry == "workspace_bytes":
        status = min(status, 0) * -1
    assert status in range(13), (entry, status)
    assert status != library.codes["INTERNAL_ERROR"], (entry, library.last_error())
    assert status != library.codes["KERNEL_FAULT"], (entry, library.last_error())
    named = library.last_error().startswith(f"{entry}: ") or "no kernel for this op" in library.last_error()
    assert status == 0 or named, (entry, library.last_error())


def main() -> None:
    """Fuzz; prints per entry how many calls were carried out and how many refused."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("progress", type=Path)
    parser.add_argument("--only", type=int, default=None)
    parser.add_argument("--runtime", type=Path, default=None)
    options = parser.parse_args()
    library = Library(options.library)
    if options.runtime is None:
        library.configure_emulator(1, 32, options.seed)
    caller = Caller(library, options.seed, DeviceMemory(options.runtime) if options.runtime else HostMemory())
    options.progress.write_bytes(b" " * 64)
    counts = {entry: [0, 0] for entry in caller.entries}
    end, number = time.monotonic() + options.seconds, options.only or 0
    with options.progress.open("r+b") as file, mmap.mmap(file.fileno(), 64) as progress:
        while time.monotonic() < end:
            progress[:] = f"{options.seed} {number}".ljust(64).encode()
            entry, status = caller.call(number)
            check(library, entry, status)
            counts[entry][status != 0] += 1
            number += 1
            if options.only is not None:
                break
    for entry, (done, refused) in counts.items():
        print(f"{entry} {done} {refused}")


if __name__ == "__main__":
    main()
