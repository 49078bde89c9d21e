"""Case B92: kernels that are plausible but wrong are named by the kit and by a shadow, and lose their op."""

import pytest
import torch
from faulty_backends import accumulates_nothing, faulty, off_by_a_percent, wrong_in_one_element

import te_hal
from te_hal import Policy, ops
from te_hal.dispatch import register_backend
from te_hal.shadowing import ShadowWarning
from te_hal.testing import Case, Status, Subject, run_case

X = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
GAMMA = torch.ones(32)

#: Op, the fault, a case of the kit that shows it, and a call of a training that meets it.
FAULTS = {
    "rmsnorm off by a percent": (
        *("rmsnorm_fwd", off_by_a_percent, "rmsnorm_fwd:everyday"),
        lambda: ops.rmsnorm_fwd(X, GAMMA)[0],
    ),
    "a sum that is not added to": (
        *("gemm", accumulates_nothing, "gemm:a=fp32,b=fp32,out=fp32,accumulate=true"),
        lambda: ops.gemm(X, X, out=torch.ones(24, 24), accumulate=True),
    ),
    "a product wrong in one element": (
        *("gemm", wrong_in_one_element, "gemm:a=fp32,b=fp32"),
        lambda: ops.gemm(X, X),
    ),
}


@pytest.fixture(params=FAULTS)
def fault(request):
    found = FAULTS[request.param]
    register_backend(faulty(found[0], found[1]))
    return found


def test_a_run_of_the_kit_names_the_op(fault) -> None:
    op, _, case, _ = fault
    outcome = run_case(Subject("faulty").prepare(), Case.of(case))
    assert (outcome.op, outcome.status) == (op, Status.FAILED)


def test_a_run_beside_the_reference_names_the_op(fault, tmp_path) -> None:
    op, _, _, call = fault
    with te_hal.shadow("faulty", folder=tmp_path) as shadow, pytest.warns(ShadowWarning, match=op):
        call()
    assert shadow.difference.op == op


def test_denying_the_op_gives_right_results_again(fault) -> None:
    op, _, _, call = fault
    due = call()
    policy = Policy(deny={op: ("faulty",)}, fallback=("cpu_reference",))
    with te_hal.use_backend("faulty"):
        assert not torch.equal(call(), due)
        with te_hal.use_policy(policy), pytest.warns(te_hal.dispatch.FallbackWarning, match="denies it"):
            assert torch.equal(call(), due)
    assert te_hal.fallback_report() == {(op, "faulty", "cpu_reference"): 1}
