"""A backend that crashes or hangs while it is loaded, or lies about its results, is named; the kit goes on."""

import hostile_backends
import pytest
import torch

import te_hal
from te_hal import ops
from te_hal.dispatch import register_backend
from te_hal.schema.errors import StateError
from te_hal.shadowing import ShadowError, replay
from te_hal.testing import Case, Kind, Subject, conformance, run_case, workers

LOADS = {
    "crashes": "the process that ran it ended by SIGSEGV while loading",
    "hangs": "loading that takes over 2 s",
}


@pytest.mark.parametrize("harm", LOADS)
def test_a_backend_that_does_not_survive_its_loading_is_named_before_this_process_loads_it(harm, monkeypatch) -> None:
    monkeypatch.setattr(workers, "START_SECONDS", 2.0 if harm == "hangs" else 60.0)
    with pytest.raises(StateError, match=rf"backend faulty: got {LOADS[harm]}"):
        conformance(Subject("faulty", factory=f"hostile_backends:{harm}"), ids=["amax:everyday"])


LIES = {
    "lies_about_sizes": ("dequantize:everyday", "output is (23, 40), torch.bfloat16, cpu; due is (24, 40)"),
    "lies_about_dtypes": ("rmsnorm_fwd:everyday", "rstd is (24,), torch.bfloat16, cpu; due is (24,), torch.float32"),
    "gives_one_result": ("rmsnorm_fwd:everyday", "1 results; due are 2: output, rstd"),
    "gives_nothing": ("gemm:everyday", "result output is None"),
    "gives_text": ("gemm:everyday", "result output is a str; due is a tensor or a QuantizedStorage"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_result_that_is_not_what_the_schema_says_is_named(lie) -> None:
    case, said = LIES[lie]
    outcome = run_case(Subject("faulty", factory=f"hostile_backends:{lie}").prepare(), Case.of(case))
    assert outcome.findings[0].kind is Kind.RESULT
    assert outcome.findings[0].sentence.startswith(said)


def multiply_and_decode(x):
    ops.gemm(x, x)
    ops.dequantize(ops.quantize(x, torch.ones(1), dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("lie", ["lies_about_sizes", "gives_nothing", "gives_text"])
def test_a_shadow_names_it_too(lie, tmp_path) -> None:
    register_backend(getattr(hostile_backends, lie)())
    shadow = te_hal.shadow("faulty", folder=tmp_path, on_difference="raise")
    with shadow, pytest.raises(ShadowError, match="got a result outside its contract"):
        multiply_and_decode(torch.randn(8, 16))
    assert shadow.difference.op == LIES[lie][0].partition(":")[0]
    assert replay(shadow.difference.file).findings
