"""Rules of the portable subset that no compiler at hand holds: read from the kernels' text."""

import re

import pytest

from te_hal.ffi.sources import FOLDER, source_files

DEVICE_SOURCES = [file for file in source_files() if file.suffix in {".mu", ".muh"} or file.parent.name == "library"]
KERNEL_SOURCES = [file for file in DEVICE_SOURCES if file.parent.name == "kernels"]

#: (pattern, the files that may have it, why nobody else may)
RULES = {
    "assembly": (r"\basm\b", ("shortcuts.muh",), "MUSA's instruction set is its own"),
    "128_bit_integers": (r"__u?int128", (), "dividing and shifting them crashes mcc"),
    "warp_size": (r"(?<!\.)\bwarpSize\b", (), "three different numbers on one MUSA chip"),
    "launch": (r"<<<", ("launch.h",), "g++ does not know it, and the grid must be checked"),
    "votes": (r"__(ballot|any|all|match_\w+|activemask|reduce_\w+)(_sync)?\b", (), "masks of 32 bits, waves of 128"),
    "shuffles": (r"__shfl", ("arithmetic.muh",), "full mask, width 32 and 4-byte types only"),
    "barriers": (r"__sync(threads|warp)\w*", ("portable.muh",), "TE_SYNC is what the emulator knows"),
    "cached_loads": (r"__ld[gc]\w*|__st[cw]\w*", (), "not on MUSA"),
    "byte_permutation": (r"__byte_perm", ("patch.muh",), "not on MUSA; the other branch there is the portable one"),
    "shared_memory": (r"\b__shared__\b", ("portable.muh",), "TE_SHARED checks its size and the emulator knows it"),
    "constant_memory": (r"\b__constant__\b", (), "8 KB on MUSA"),
    "qualifiers": (r"\b__(global|device|host)__\b", ("portable.muh", "resident.muh"), "TE_KERNEL and TE_DEVICE"),
    "launch_bounds": (r"__launch_bounds__", ("portable.muh", "resident.muh"), "one argument only on MUSA"),
    "indices": (r"\b(thread|block)Idx\b|\b(block|grid)Dim\b", ("portable.muh",), "thread_index() and its like"),
    "cooperative_groups": (r"cooperative|cuda::|cub::|thrust::", (), "missing or broken on MUSA"),
    "half_types": (r"\b__?half2?\b|__nv_bfloat|__mt_bfloat|__half2float|__float2half", (), "holes on mp_22"),
    "fp8_headers": (r"__nv_|__musa_|__mt_|__NV_|__MT_", ("fp8.muh",), "one macro decides about the instruction"),
    "architecture": (
        r"__CUDA_ARCH__|__MUSA_ARCH__", ("fp8.muh", "patch.muh", "shortcuts.muh"), "two makers, two scales"
    ),
    "approximations": (
        r"__(expf|logf|fdividef|frcp\w+|frsqrt\w+|powf|sinf|cosf)\b|\brsqrtf\b", (),
        "each inexact its own way"
    ),
    "long_double": (r"long double", (), "no device has it"),
    "traps": (r"__trap|\bassert\s*\(", (), "a kernel that stops takes the process with it on MUSA"),
}  # fmt: skip
#: Calls that hold a barrier, or an exchange that all 32 lanes must join.
WAITS = re.compile(
    r"\b(TE_SYNC|block_max|block_sum|group_\w+|four_lanes_max|shuffle_xor|find_cast_scale|find_tensor_scales|"
    r"reduce_partials|leave_tile_sums)\b"
)

#: Runtime calls and types by the part of their name that both runtimes share. Every one is used with the musa prefix
#: in published code or in the vendor's documentation.
TWINS = frozenset({
    "Error_t", "Stream_t", "Success", "DeviceProp", "FuncAttributes", "MemcpyDeviceToHost",
    "GetLastError", "GetErrorString", "GetDevice", "SetDevice", "GetDeviceCount", "GetDeviceProperties",
    "FuncGetAttributes", "DeviceGetAttribute", "DevAttrMultiProcessorCount", "Malloc", "Free", "Memcpy",
    "StreamSynchronize",
})  # fmt: skip


def code_of(file):
    """The text without comments and string literals, line numbers kept."""
    text = file.read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r'"(\\.|[^"\\\n])*"', '""', text)


@pytest.mark.parametrize("rule", RULES)
def test_the_text_keeps_to_the_subset(rule):
    pattern, allowed, why = RULES[rule]
    found = [
        f"{file.relative_to(FOLDER)}:{number}: {line.strip()}  ({why})"
        for file in DEVICE_SOURCES
        if file.name not in allowed
        for number, line in enumerate(code_of(file).splitlines(), 1)
        if re.search(pattern, line)
    ]

    assert not found, "\n".join(found)


def test_assembly_is_kept_from_every_compiler_but_nvcc():
    text = code_of(FOLDER / "kernels" / "shortcuts.muh")
    guarded = re.findall(r"#if TE_SHORTCUTS\n(.*?)#else", text, re.DOTALL)

    assert "#if TE_TARGET_CUDA && defined(__CUDA_ARCH__)" in text
    assert sum(block.count("asm(") for block in guarded) == text.count("asm(") == 3


def test_no_kernel_uses_the_standard_library():
    """Clang accepts constexpr functions of it in device code, nvcc does not; host code beside kernels may."""
    for file in KERNEL_SOURCES:
        assert not re.search(r"#include\s+<(?!math\.h|stddef\.h|stdint\.h|cuda_|musa_)", code_of(file)), file.name


def kernels_in(text):
    """(name, body) of every kernel."""
    for match in re.finditer(r"TE_KERNEL(?:_RESIDENT\(.*\))?\s+(\w+)\(", text):
        start = text.index("{", text.index(")", match.end()))
        depth, end = 0, start
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                break
        yield match.group(1), text[start:end]


def test_no_kernel_returns_before_its_last_barrier():
    checked = 0
    for file in KERNEL_SOURCES:
        for name, body in kernels_in(code_of(file)):
            waits = [match.start() for match in WAITS.finditer(body)]
            early = [m.start() for m in re.finditer(r"\breturn\b", body) if waits and m.start() < waits[-1]]
            assert not early, f"{file.name}: {name}"
            checked += 1
    assert checked >= 31


def test_every_name_of_the_runtime_has_its_musa_twin():
    used = {name for file in DEVICE_SOURCES for name in re.findall(r"TE_RUNTIME\((\w+)\)", code_of(file))} - {"name"}

    assert used <= TWINS, used - TWINS
    assert {"GetLastError", "Malloc", "Stream_t"} <= used


def test_no_runtime_name_is_written_out():
    for file in DEVICE_SOURCES:
        assert not re.search(r"\b(cuda|musa)[A-Z]\w+", code_of(file)), file.name
