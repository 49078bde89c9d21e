"""The kit on this repository's own backends: a quick tier always, every case in the full run."""

from __future__ import annotations

import pytest

from te_hal.ffi.devices import HOST
from te_hal.ffi.native import Native
from te_hal.schema.catalog import SCHEMAS
from te_hal.testing import Case, Status, Subject, cases, describe, run_case
from te_hal.testing.session import conformance

BACKENDS = pytest.mark.parametrize("backend", ["cpu_reference", "musa_emulator"])
#: Cases that found something, each in one of these backends.
ONCE_WRONG = (
    "update_delayed_scale:shape=8x8,values=zeros,reduced_amax=fp32,memory=strided",
    "dequantize:shape=3x5x7,input=e4m3.mxfp8.row,memory=far",
    "dequantize:shape=1,input=e4m3.block_1x128.both,out_dtype=fp32,memory=strided",
    "quantize:shape=3x5x7,out=given,memory=turned",
    "softmax_fwd:shape=2x5x257,values=inf,input=fp16,scale=0.125",
    "softmax_fwd:values=inf,input=fp32,causal=top_left,window=5:-1",
    "amax:shape=0x16,values=nan,out=fp32",
    "layernorm_quantize:values=equal,scale=fp32,amax=fp32,zero_centered_gamma=true",
    "dequantize:shape=16x0,values=equal,input=e2m1.nvfp4_hadamard.column,out_dtype=fp32",
    "layernorm_quantize:shape=1x1,values=outlier,zero_centered_gamma=true",
)


def skip_without_library(backend: str) -> None:
    if backend == "musa_emulator" and not Native(backend, "host", HOST).opens():
        pytest.skip("the host's kernel library is not built")


@BACKENDS
@pytest.mark.parametrize("op", SCHEMAS)
def test_an_own_backend_passes_the_quick_tier(backend, op):
    skip_without_library(backend)
    tested = Subject(backend).prepare()
    outcomes = [run_case(tested, case) for case in cases(op, quick=True)]
    assert [(o.case, [str(f) for f in o.findings]) for o in outcomes if o.status is Status.FAILED] == []


@BACKENDS
@pytest.mark.parametrize("case", ONCE_WRONG)
def test_what_was_wrong_once_is_right(backend, case):
    skip_without_library(backend)
    outcome = run_case(Subject(backend).prepare(), Case.of(case))
    assert outcome.findings == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "emulator"),
    [("cpu_reference", ""), ("musa_emulator", "wave=32"), ("musa_emulator", "wave=128")],
    ids=["cpu_reference", "musa_emulator-wave=32", "musa_emulator-wave=128"],
)
def test_an_own_backend_conforms(backend, emulator, monkeypatch):
    skip_without_library(backend)
    if emulator:
        # Read when a library is loaded, which the workers do.
        monkeypatch.setenv("TE_HAL_EMULATOR", emulator)
    session = conformance(Subject(backend), jobs=2)
    assert session.clean, describe(session)
    assert session.missing == ()
