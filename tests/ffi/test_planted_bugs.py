"""Bugs of the kind that devices punish and CPUs forgive, planted in the real kernels: the emulator must show each.

A bug is shown by a status that names it, or by wrong results in at least one order of the threads.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from emulator_orders import ORDERS
from native_cases import bytes_like, tensor_of
from native_table import KernelError, Library

import te_hal.backends.cpu_reference.cast as reference
from te_hal.backends.cpu_reference.delayed_scale import update_delayed_scale
from te_hal.ffi.sources import EMULATOR_SOURCES, FOLDER
from te_hal.ffi.toolchains import TOOLCHAINS
from te_hal.schema.block_scales import block_copy
from te_hal.schema.formats import ScalingMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

E4M3 = torch.float8_e4m3fn

# The entries that the bugs are planted in, and no more: a library that compiles in two seconds.
_SMALL_LIBRARY = """
#include "library/first.h"
#include "kernels/amax.mu"
#include "kernels/block_entries.mu"
#include "kernels/cast_entries.mu"
#include "kernels/delayed_scale.mu"
#include "kernels/transpose.mu"
#include "library/device_entries.mu"
extern "C" __attribute__((visibility("default"))) const te_hal_api* te_hal_get_api(uint32_t) {
    static te_hal_api api = {};
    api.struct_size = TE_HAL_API_SIZE;
    api.last_error = &te::last_error;
    api.configure_emulator = &te::configure_emulator;
    api.transpose = &te::transpose;
    api.quantize = &te::quantize;
    api.quantize_blocks = &te::quantize_blocks;
    api.amax = &te::amax;
    api.update_delayed_scale = &te::update_delayed_scale;
    return &api;
}
"""
_NVFP4_LIBRARY = """
#include "library/first.h"
#include "kernels/amax.mu"
#include "kernels/nvfp4_entries.mu"
#include "library/device_entries.mu"
extern "C" __attribute__((visibility("default"))) const te_hal_api* te_hal_get_api(uint32_t) {
    static te_hal_api api = {};
    api.struct_size = TE_HAL_API_SIZE;
    api.last_error = &te::last_error;
    api.configure_emulator = &te::configure_emulator;
    api.quantize_nvfp4 = &te::quantize_nvfp4;
    return &api;
}
"""
_TEXTS = (_SMALL_LIBRARY, _NVFP4_LIBRARY)
# Bytes after a result: more than one block of threads writes.
_BEHIND = 3 * 8192
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-U_FORTIFY_SOURCE")


@dataclass(frozen=True)
class Bug:
    """A text in a kernel, what it becomes, the check that meets it, and what the emulator says; None: wrong results."""

    file: str
    text: str
    becomes: str
    check: Callable[[Library], bool]
    says: str | None = None


# ---- checks: True if all is right ----


def casts_right(library: Library, shape: tuple[int, int] = (136, 264), *, amax: bool = False) -> bool:
    x, scale = tensor_of(shape, torch.bfloat16), torch.tensor([3.7])
    running = torch.zeros(1) if amax else None
    expected_amax = torch.zeros(1)
    expected = reference.quantize(x, scale, amax=expected_amax, dtype=E4M3, columnwise=True)
    size = shape[0] * shape[1]
    room = bytes_like(size + _BEHIND)  # what lies behind the codes must stay as it is
    codes, turned = room[:size].view(shape), bytes_like(*shape[::-1])
    library.quantize(x, "BFLOAT16", *shape, scale, running, codes, turned, 0, None, None, "FLOAT8_E4M3", 0)
    rows_alone = bytes_like(size + _BEHIND)
    library.quantize(x, "BFLOAT16", *shape, scale, None, rows_alone, None, 0, None, None, "FLOAT8_E4M3", 0)
    return (
        torch.equal(codes, expected.rowwise_data)
        and torch.equal(turned, expected.columnwise_data)
        and torch.equal(rows_alone, room)
        and bool((room[size:] == 0xAA).all())
        and (running is None or torch.equal(running, expected_amax))
    )


def records_amax(library: Library) -> bool:
    return casts_right(library, amax=True)


def odd_tails_right(library: Library) -> bool:
    return casts_right(library, (13, 77))


def transposes_right(library: Library) -> bool:
    x, turned = bytes_like(136, 264).random_(), bytes_like(264, 136)
    library.transpose(x, turned, 136, 264, 1, 0)
    return torch.equal(turned, x.t())


def blocks_right(library: Library, mode: str = "MODE_BLOCK_1X128") -> bool:
    """Against blocks cast one after another as tensors of their own."""
    x = tensor_of((136, 264), torch.bfloat16, special=False)
    length = 32 if mode == "MODE_MXFP8" else 128
    turned, grid = bytes_like(264, 136), torch.zeros(-(-136 // length), 264)
    rows, row_grid = bytes_like(136, 264), torch.zeros(136, -(-264 // length))
    if mode == "MODE_MXFP8":
        grid, row_grid = grid.byte(), row_grid.byte()
    library.quantize_blocks(
        *(x, "BFLOAT16", 136, 264, mode, 0.0, 0, rows, row_grid, row_grid.stride(0), 1),
        *(turned, grid, 264, 1, 0, "FLOAT8_E4M3", 0),
    )
    expected = torch.empty(136, 264, dtype=torch.uint8)
    expected_rows = torch.empty(136, 264, dtype=torch.uint8)
    for i, j in itertools.product(range(0, 136, length), range(0, 264, length)):
        part = x[i : i + length, j : j + length].float()
        for target, dim in ((expected, 0), (expected_rows, 1)):
            largest = part.abs().amax(dim, keepdim=True)
            scale = torch.full_like(largest, 448.0) / largest
            if mode == "MODE_MXFP8":
                scale = torch.exp2(scale.log2().floor())
            scaled = (part * scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
            target[i : i + length, j : j + length] = scaled
    return torch.equal(turned.t(), expected) and torch.equal(rows, expected_rows)


def mxfp8_right(library: Library) -> bool:
    return blocks_right(library, "MODE_MXFP8")


def nvfp4_right(library: Library, mode: ScalingMode = ScalingMode.NVFP4_HADAMARD) -> bool:
    x = tensor_of((144, 272), torch.bfloat16, special=False)
    expected = reference.quantize(x, dtype=torch.uint8, mode=mode, columnwise=True)
    row, row_scales, column, column_scales = (t.clone().fill_(0xAA) for t in expected.tensors())
    room = bytes_like(column.numel() + _BEHIND)  # what lies behind the codes must stay as it is
    column = room[: column.numel()].view(column.shape)
    library.quantize_nvfp4(
        *(x, "BFLOAT16", 144, 272, f"MODE_{mode.value.upper()}", 0, 0, 0),
        *(row, row_scales, column, column_scales, torch.empty(1024), 4096, 0),
    )
    made = expected.with_tensors((row, row_scales, column, column_scales))
    pairs = [[block_copy(storage, rowwise=rowwise) for storage in (made, expected)] for rowwise in (True, False)]
    equal = [torch.equal(a.codes, b.codes) and torch.equal(a.grid, b.grid) for a, b in pairs]
    return all(equal) and bool((room[column.numel() :] == 0xAA).all())


def nvfp4_squares_right(library: Library) -> bool:
    return nvfp4_right(library, ScalingMode.NVFP4_16X16)


def histories_right(library: Library) -> bool:
    history, scale = torch.rand(600, 3) + 1.0, torch.ones(3)
    expected_history, expected_scale = history.clone(), scale.clone()
    update_delayed_scale(expected_history, expected_scale, fp8_max=448.0)
    library.update_delayed_scale(history, scale, None, 600, 3, 448.0, 0, 0, 0)
    return torch.equal(history, expected_history) and torch.equal(scale, expected_scale)


def amax_right(library: Library) -> bool:
    x, found = torch.arange(1000, dtype=torch.float32), torch.zeros(1)
    library.amax(x, "FLOAT32", 1000, found, 0, torch.empty(512), 2048, 0)
    return found.item() == 999.0


BUGS = {
    "removed_barrier_before_a_tile_is_read": Bug(
        "cast.mu", "    TE_SYNC();\n    write_columns", "    write_columns", casts_right
    ),
    "removed_barrier_in_a_transposition": Bug(
        "transpose.mu", "    TE_SYNC();\n    write_columns", "    write_columns", transposes_right
    ),
    "lanes_of_a_wave_taken_to_finish_together": Bug(
        "reduce.muh", "partials.words[thread / 32] = value;\n    TE_SYNC();",
        "partials.words[thread / 32] = value;", records_amax,
    ),
    "early_return_before_a_barrier": Bug(
        "transpose.mu", "    Vector8 codes[kPatch];", "    if (!place.inside) return;\n    Vector8 codes[kPatch];",
        transposes_right, "after",
    ),
    "barrier_for_one_half_of_the_threads": Bug(
        "transpose.mu", "    TE_SYNC();\n    write_columns", "if (thread_index() < 128) TE_SYNC();\n    write_columns",
        transposes_right, "after",
    ),
    "two_barriers_in_two_branches": Bug(
        "transpose.mu", "    TE_SYNC();\n    write_columns",
        "    if (thread_index() < 128) { TE_SYNC(); } else { TE_SYNC(); }\n    write_columns",
        transposes_right, "a barrier in divergent code",
    ),
    "exchange_under_a_condition_of_the_lane": Bug(
        "block_cast.mu", "if (rowwise && !kLong) find", "if (rowwise && !kLong && place.inside) find", mxfp8_right,
        "an exchange in divergent code",
    ),
    "maxima_read_before_all_are_written": Bug(
        "block_cast.mu", "    TE_SYNC();\n    // Long blocks", "    // Long blocks", blocks_right
    ),
    "scales_read_before_all_are_written": Bug(
        "block_cast.mu", "    TE_SYNC();\n    if (rowwise) {", "    if (rowwise) {", blocks_right
    ),
    "missing_barrier_before_shared_memory_is_reused": Bug(
        "block_cast.mu", "TE_SYNC();  // the tile takes the place of the scales", "", blocks_right
    ),
    "stale_shared_memory": Bug(
        "block_cast.mu", "if (columnwise) put_column_maxima", "if (columnwise && place.inside) put_column_maxima",
        blocks_right,
    ),
    "shared_memory_over_the_limit": Bug(
        "patch.muh", "Vector8 words[kTile * kPatchesAcross];", "Vector8 words[kTile * kPatchesAcross * 2];",
        transposes_right, "bytes of shared memory",
    ),
    "rows_overwritten_before_they_are_read": Bug(
        "delayed_scale.mu", "TE_SYNC();  // a row", "// a row", histories_right, "others never reach",
    ),
    "tail_written_past_the_end": Bug(
        "cast.mu", "store_codes<false>(target.rowwise + at, codes, count - at)",
        "store_codes<false>(target.rowwise + at, codes, 8)", odd_tails_right,
    ),
    "codes_of_columns_read_before_all_are_written": Bug(
        "nvfp4_cast.mu", "        TE_SYNC();\n        write_strip", "        write_strip", nvfp4_right
    ),
    "partial_maxima_overwritten_while_they_are_read": Bug(
        "nvfp4_cast.mu", "target.transformed_count, shared.of_transformed", "target.transformed_count, shared.of_input",
        nvfp4_right,
    ),
    "exchange_for_the_strips_inside_alone": Bug(
        "nvfp4_cast.mu", "target.square ? four_lanes_max(strip", "target.square && place.inside ? four_lanes_max(strip",
        nvfp4_squares_right, "an exchange in divergent code",
    ),
    "columns_written_past_the_end": Bug(
        "nvfp4_cast.mu", "const int64_t count = step.inside ? 8 : 0;", "const int64_t count = 8;", nvfp4_right
    ),
    "tail_left_out": Bug(
        "amax.mu", "const int64_t octets = (count + 7) / 8;", "const int64_t octets = count / 9;", amax_right
    ),
}  # fmt: skip


# ---- compiling ----


@pytest.fixture(scope="module")
def emulator_objects(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("emulator")
    compiler = str(TOOLCHAINS["host"].find())
    for source in EMULATOR_SOURCES:
        command = [compiler, *_FLAGS, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
        subprocess.run(command, check=True)
    return [str(folder / f"{source.stem}.o") for source in EMULATOR_SOURCES]


def compile_with(bug: Bug | None, folder: Path, objects: list[str], text: str) -> Library:
    """A small library with one bug, or none."""
    for part in ("include", "kernels", "library", "emulator"):
        shutil.copytree(FOLDER / part, folder / part)
    if bug is not None:
        file = folder / "kernels" / bug.file
        source = file.read_text(encoding="utf-8")
        assert bug.text in source, f"{bug.file} no longer has the text that this bug replaces"
        file.write_text(source.replace(bug.text, bug.becomes), encoding="utf-8")
    if bug is not None and bug.says == "bytes of shared memory":
        portable = folder / "kernels" / "portable.muh"  # the limit at compile time would catch it before
        portable.write_text(portable.read_text(encoding="utf-8").replace("24 * 1024", "64 * 1024"), encoding="utf-8")
    (folder / "small.cpp").write_text(text, encoding="utf-8")
    library = folder / "libsmall.so"
    compiler = str(TOOLCHAINS["host"].find())
    command = [compiler, *_FLAGS, "-shared", str(folder / "small.cpp"), *objects, "-pthread", "-o", str(library)]
    subprocess.run(command, check=True)
    return Library(library)


def shown_by(library: Library, check: Callable[[Library], bool]) -> list[str]:
    """What each order of the threads shows: "", "wrong results", or the emulator's sentence."""
    shown = []
    for order in ORDERS.values():
        library.configure_emulator(*order)
        try:
            shown.append("" if check(library) else "wrong results")
        except KernelError as error:
            shown.append(str(error))
    return shown


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_shown(name, tmp_path, emulator_objects):
    bug = BUGS[name]

    text = _TEXTS[bug.file.startswith("nvfp4")]
    shown = shown_by(compile_with(bug, tmp_path, emulator_objects, text), bug.check)

    if bug.says is None:
        assert "wrong results" in shown
    else:
        assert all("KERNEL_FAULT" in text and bug.says in text for text in shown), shown


def test_without_a_bug_every_check_passes(tmp_path, emulator_objects):
    libraries = [compile_with(None, tmp_path / str(n), emulator_objects, text) for n, text in enumerate(_TEXTS)]

    for check, is_fp4 in {(bug.check, bug.file.startswith("nvfp4")) for bug in BUGS.values()}:
        library = libraries[is_fp4]
        assert shown_by(library, check) == ["", "", ""], check.__name__
