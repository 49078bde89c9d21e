"""The binding: made from the header alone, with the header's numbers, and absent without harm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import native_stub
import native_table
import pytest

from te_hal.ffi import build_native, codes
from te_hal.ffi.binding import binding
from te_hal.ffi.loader import open_library
from te_hal.schema.activation import ACTIVATIONS
from te_hal.schema.errors import BackendUnavailableError

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER_CODES = native_table.codes()


@pytest.fixture(autouse=True)
def _needs_the_binding() -> None:
    native_stub.need()


def numbers() -> dict[str, int]:
    """Every number of codes.py by the header's name."""
    named = {f"OP_{name.upper()}": number for name, number in codes.OPS.items()}
    named |= {name.upper(): number for name, number in codes.ACTIVATION_KINDS.items()}
    named |= {f"LAYOUT_{name.upper()}": number for name, number in codes.LAYOUTS.items()}
    named |= {f"CAUSAL_{name.upper()}": number for name, number in codes.CAUSAL.items()}
    named |= {f"AMAX_{name.upper()}": number for name, number in codes.AMAX_ALGOS.items()}
    named |= {f"MODE_{mode.value.upper()}": number for mode, number in codes.MODES.items()}
    named |= {f"ORDER_{order.value.upper()}": number for order, number in codes.ORDERS.items()}
    named |= {f"COPY_COLUMNWISE_{order.value.upper()}": number for order, number in codes.COPIES.items()}
    dtypes = {str(dtype)[len("torch.") :].upper().removesuffix("FN"): number for dtype, number in codes.DTYPES.items()}
    spelled = {"FLOAT8_E4M3FN": "FLOAT8_E4M3", "UINT8": "FLOAT4_E2M1"}
    named |= {spelled.get(name, name): number for name, number in dtypes.items()}
    alone = ("NO_DTYPE", "MODE_NONE", "MODE_TENSOR_CURRENT", "COPY_ROWWISE", "LAYERNORM", "RMSNORM")
    flags = [name for name in vars(codes) if name.startswith("FLAG_")]
    return named | {name: getattr(codes, name) for name in (*alone, *flags)}


def test_every_number_is_the_headers() -> None:
    found = numbers()
    assert found == {name: HEADER_CODES[name] for name in found}


def test_every_number_of_the_header_that_describes_a_call_is_there() -> None:
    prefixes = ("OP_", "LAYOUT_", "CAUSAL_", "AMAX_", "MODE_", "ORDER_", "COPY_", "FLAG_", "FLOAT", "BFLOAT16")
    wanted = {name for name in HEADER_CODES if name.startswith(prefixes)} | {name.upper() for name in ACTIVATIONS}
    assert wanted <= numbers().keys()


def test_every_entry_of_the_header_has_a_trampoline() -> None:
    lib = binding().lib
    entries = re.findall(r"^    \w[\w ]*\*?\(\*(\w+)\)\(", build_native.HEADER.read_text(), re.MULTILINE)
    assert len(entries) >= 29
    assert all(callable(getattr(lib, f"api_{name}")) for name in entries)


def test_a_trampoline_answers_for_an_entry_that_the_table_does_not_have(stub) -> None:
    lib = binding().lib
    assert lib.api_amax(lib.te_hal_closed(), 0, 0, 0, 0, 0, 0, 0, 0) == lib.TE_HAL_MISSING_ENTRY
    assert binding().ffi.string(lib.api_last_error(lib.te_hal_closed())) == b""
    without = open_library(stub(NULL_configure_emulator=1))
    assert lib.api_configure_emulator(without.api, 1, 32, 0) == lib.TE_HAL_MISSING_ENTRY


def test_an_entry_whose_comment_begins_with_optional_may_be_null() -> None:
    _, table = build_native.split_table(build_native.without_preprocessor(build_native.HEADER.read_text()))
    optional = [entry.name for entry in build_native.table_entries(table) if entry.optional]
    assert optional == ["configure_emulator"]


def test_addresses_are_integers_that_nobody_converts_from_a_tensor_by_its_value() -> None:
    lib = binding().lib
    with pytest.raises(OverflowError):
        lib.api_transpose(lib.te_hal_closed(), -1, 0, 0, 0, 1, 0)
    with pytest.raises(OverflowError):
        lib.api_transpose(lib.te_hal_closed(), 0, 0, 1 << 63, 0, 1, 0)
    with pytest.raises(TypeError):
        lib.api_transpose(lib.te_hal_closed(), None, 0, 0, 0, 1, 0)


WITHOUT_BINDING = """
import sys
sys.modules["te_hal.ffi._native"] = None
import torch, te_hal, te_hal.modules as te
from te_hal import recipe
print(*(f"{row.name}: {row.usable} {row.reason}" for row in te_hal.list_backends()), sep="\\n")
with te.autocast(recipe=recipe.DelayedScaling()):
    print(te.Linear(32, 32)(torch.ones(16, 32)).shape)
"""


def test_without_the_binding_all_but_the_native_backends_works_and_says_why() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", WITHOUT_BINDING]
    result = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = dict(line.split(": ", 1) for line in result.stdout.splitlines()[:-1])
    assert rows["cpu_reference"] == "True "
    assert "the binding of the native backends" in rows["musa_emulator"]
    assert "C compiler" in rows["musa_emulator"]
    assert result.stdout.splitlines()[-1] == "torch.Size([16, 32])"


def test_a_binding_that_cannot_be_imported_is_told_from_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import te_hal.ffi  # noqa: PLC0415 - its attribute is taken away here

    monkeypatch.delattr(te_hal.ffi, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "te_hal.ffi._native", None)
    with pytest.raises(BackendUnavailableError, match=r"cannot be imported|C compiler"):
        binding.__wrapped__()
