"""docs/imports.md: every name in its table is where the table says."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import te_hal.modules as te
from te_hal.quantization import FP8BwdTensorIdx, FP8FwdTensorIdx

PAGE = (Path(__file__).parent.parent / "docs" / "imports.md").read_text(encoding="utf-8")
LINES = [line.split("|")[1:-1] for line in PAGE.splitlines() if "| `te_hal" in line]
ROWS = [[re.findall("`([^`]+)`", cell) for cell in line] for line in LINES]


@pytest.mark.parametrize("row", ROWS, ids=[row[0][0] for row in ROWS])
def test_every_name_is_there(row):
    _, (place,), names = row
    assert names
    assert [name for name in names if not hasattr(import_module(place), name)] == []


def test_slots_have_the_names_of_their_tensors():
    roles = te.GroupedLinear(3, 32, 32).quantizer_roles()
    forward = {slot: slot.name.split("_")[1].lower() for slot in FP8FwdTensorIdx}
    backward = {slot: slot.name[:-1].lower() for slot in FP8BwdTensorIdx}
    for key, names in (("scaling_fwd", forward), ("scaling_bwd", backward)):
        assert len(names) == len(roles[key])
        for slot, name in names.items():
            role = roles[key][slot]
            assert name == role.tensor_type if role is not None else name in ("output", "grad_input")
