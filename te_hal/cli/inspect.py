"""`te-hal inspect`: what a checkpoint holds."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from te_hal.cli.checkpoint_contents import as_json, list_contents
from te_hal.cli.checkpoint_file import read_file
from te_hal.cli.failure import FAILED, fail, wrong_input_ends

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from te_hal.cli.checkpoint_contents import Contents, SavedExtraState
    from te_hal.cli.checkpoint_file import CheckpointFile

#: Slots of one gemm, as scaling state has them in order.
_SLOTS = {"fwd": ("input", "weight", "output"), "bwd": ("grad_output", "grad_input")}


def inspect(
    file: Annotated[Path, typer.Argument(help="A file of torch.save, safetensors, or te-hal compare.")],
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the same, histories included, as JSON.")] = False,
) -> None:
    """Print what a checkpoint holds: tensors, and the scaling state of FP8 modules. Nothing in it is run.

    Exit code 1 where a module's scaling state cannot be read, 2 where the file cannot.
    """
    with wrong_input_ends():
        found = read_file(file)
    contents = list_contents(found.content)
    if json_wanted:
        print(json.dumps({"file": str(file), "kind": found.kind, "bytes": found.nbytes, **as_json(contents)}, indent=1))
    else:
        print("\n".join(_lines(file, found, contents)))
    refused = [each for each in contents.extra_states if each.refused]
    if refused:
        fail(f"{len(refused)} extra states of {file} cannot be read; the first: {refused[0].refused}", FAILED)


def _lines(path: Path, found: CheckpointFile, contents: Contents) -> Iterator[str]:
    total = sum(tensor.nbytes for tensor in contents.tensors)
    yield f"{path}: {found.kind}, {found.nbytes:,} bytes"
    yield f"{len(contents.tensors)} tensors, {total:,} bytes"
    rows = [
        (f"{tensor.nbytes:,}", tensor.name, tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar", tensor.note)
        for tensor in contents.tensors
    ]
    yield from (f"  {line}" for line in _aligned(rows))
    if contents.extra_states:
        empty = sum(each.state is None and not each.refused for each in contents.extra_states)
        yield f"{len(contents.extra_states)} extra states, {empty} of them empty"
    for each in contents.extra_states:
        if each.state is not None or each.refused:
            yield from _extra_state_lines(each)
    if contents.others:
        yield f"{len(contents.others)} other values"
        yield from (f"  {name} = {value!r}"[:120] for name, value in contents.others.items())


def _extra_state_lines(each: SavedExtraState) -> Iterator[str]:
    if each.state is None:
        yield f"  {each.name}: {each.nbytes:,} bytes, refused: {each.refused}"
        return
    fields = ", ".join(f"{name}={value}" for name, value in each.state.fields.items() if value is not None)
    yield f"  {each.name}: {each.nbytes:,} bytes by {each.written_by}, {each.state.recipe}({fields})"
    if not any(bool((a != float(name.startswith("scale"))).any()) for name, a in each.state.arrays.items()):
        yield "    nothing recorded: scales are 1, histories 0"
        return
    rows: list[tuple[str, ...]] = [("", "scale", "newest amax", "largest amax")]
    for way, slots in _SLOTS.items():
        scale, history = (each.state.arrays.get(f"{name}_{way}") for name in ("scale", "amax_history"))
        if scale is not None and history is not None and history.dim() == 2:  # noqa: PLR2004 - rows by slots
            rows += _slot_rows(slots, scale, history)
    yield from (f"    {line}" for line in _aligned(rows))


def _slot_rows(slots: Sequence[str], scale: torch.Tensor, history: torch.Tensor) -> Iterator[tuple[str, ...]]:
    """The running amax stands in row 0 of a history, the newest past one in the last row."""
    gemms = scale.numel() // len(slots)
    for number in range(scale.numel()):
        gemm, slot = divmod(number, len(slots))
        name = slots[slot] if gemms == 1 else f"{slots[slot]} {gemm + 1}"
        column = history[:, number]
        yield name, f"{scale[number]:.6g}", f"{column[-1]:.6g}", f"{column.max():.6g}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns below each other, numbers of the first one to the right if there is more than a heading."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))] if rows else []
    first_is_number = bool(rows) and rows[0][0][:1].isdigit()
    lines = []
    for first, *others in rows:
        start = first.rjust(widths[0]) if first_is_number else first.ljust(widths[0])
        rest = (cell.ljust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([start, *rest]).rstrip())
    return lines
