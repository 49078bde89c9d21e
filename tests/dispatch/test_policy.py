"""Case B91: what a policy allows. Fallback is decided before launch, listed, counted and announced."""

import inspect
import pickle
import warnings
from collections.abc import Callable, Mapping

import pytest
import torch
from stub_backends import refuse, stub, yes

import te_hal
from te_hal import Policy, ops
from te_hal.dispatch import FallbackWarning, register_backend, registry, resolve
from te_hal.schema.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendNotFoundError,
    BackendUnavailableError,
    StateError,
    UnsupportedError,
)
from te_hal.schema.support import Call, Code, Support

INPUT = torch.ones(3)
KINDS: Mapping[str, torch.dtype | None] = {"input": torch.float32, "out": None}
AMAX = Call("amax", torch.device("cpu"), KINDS)


class Trace:
    """Kernels that record who ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def runs(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: self.ran.append(name)

    def fails(self, name: str, error: Exception) -> Callable[[torch.Tensor], None]:
        def act(input: torch.Tensor) -> None:
            input.add_(1.0)
            self.ran.append(name)
            raise error

        return act


@pytest.fixture
def trace() -> Trace:
    """Backends: `picky` says no to everything, `fp32` and `other` can, `elsewhere` serves no CPU."""
    found = Trace()
    register_backend(stub("picky", act=found.runs("picky"), supports=refuse("does not do fp32")))
    register_backend(stub("fp32", act=found.runs("fp32")))
    register_backend(stub("other", act=found.runs("other")))
    register_backend(stub("elsewhere", act=found.runs("elsewhere"), serves={"meta"}))
    register_backend(stub("dead", act=found.runs("dead"), usable=lambda: Support.no(Code.ENVIRONMENT, "is unplugged")))
    return found


def test_without_a_policy_a_refusal_is_an_error_with_its_reason(trace: Trace) -> None:
    te_hal.set_backend("picky")
    with pytest.raises(UnsupportedError, match=r"amax on backend picky: .*picky: does not do fp32"):
        ops.amax(INPUT)
    assert trace.ran == []
    assert te_hal.fallback_report() == {}


def test_the_next_listed_backend_that_can_takes_over_and_every_call_is_counted(trace: Trace) -> None:
    te_hal.set_backend("picky")
    te_hal.set_policy(Policy(fallback=("dead", "elsewhere", "fp32", "other")))
    with pytest.warns(FallbackWarning, match=r"amax: runs on backend 'fp32'.* 'picky' refused: does not do fp32"):
        ops.amax(INPUT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.amax(INPUT)
        ops.amax(INPUT.bfloat16())
    assert trace.ran == ["fp32"] * 3
    assert te_hal.fallback_report() == {("amax", "picky", "fp32"): 3}


def test_a_backend_without_the_kernel_counts_as_refusing(trace: Trace) -> None:
    register_backend(stub("empty", kernels={}))
    with (
        te_hal.use_backend("empty"),
        te_hal.use_policy(Policy(fallback=("other",))),
        pytest.warns(FallbackWarning, match=r"has no kernel for amax"),
    ):
        ops.amax(INPUT)
    assert trace.ran == ["other"]


def test_nobody_left_is_one_error_with_every_reason(trace: Trace) -> None:
    register_backend(stub("empty", kernels={}))
    te_hal.set_backend("picky")
    te_hal.set_policy(Policy(fallback=("dead", "elsewhere", "empty")))
    with pytest.raises(UnsupportedError) as error:
        ops.amax(INPUT)
    for reason in (
        "picky: does not do fp32",
        "dead: is unplugged",
        "elsewhere: does not serve cpu, only meta",
        "empty: has no kernel for amax",
    ):
        assert reason in str(error.value)
    assert "amax(input=torch.float32) on cpu" in str(error.value)
    assert trace.ran == []


def test_a_backend_that_is_its_own_fallback_is_asked_once(trace: Trace) -> None:
    te_hal.set_backend("picky")
    te_hal.set_policy(Policy(fallback=("picky",)))
    with pytest.raises(UnsupportedError) as error:
        ops.amax(INPUT)
    assert str(error.value).count("does not do fp32") == 1
    assert trace.ran == []


@pytest.mark.parametrize("fallback", [(), ("fp32",)], ids=["no_fallback", "fallback_listed"])
def test_an_op_that_raises_gives_its_own_error_at_once_and_runs_nowhere_else(
    trace: Trace, fallback: tuple[str, ...]
) -> None:
    mine = MemoryError("out of device memory")
    register_backend(stub("failing", act=trace.fails("failing", mine)))
    te_hal.set_backend("failing")
    te_hal.set_policy(Policy(fallback=fallback))
    touched = torch.zeros(3)
    with pytest.raises(MemoryError) as error:
        ops.amax(touched)
    assert error.value is mine
    assert trace.ran == ["failing"]
    assert touched.tolist() == [1.0, 1.0, 1.0]
    assert te_hal.fallback_report() == {}


def test_a_fallback_that_raises_gives_its_own_error(trace: Trace) -> None:
    mine = RuntimeError("fallback kernel failed")
    register_backend(stub("failing", act=trace.fails("failing", mine)))
    te_hal.set_backend("picky")
    te_hal.set_policy(Policy(fallback=("failing", "fp32")))
    with pytest.warns(FallbackWarning), pytest.raises(RuntimeError) as error:
        ops.amax(torch.zeros(3))
    assert error.value is mine
    assert trace.ran == ["failing"]


def test_an_op_that_writes_in_place_may_fall_back_because_nothing_ran_before(trace: Trace) -> None:
    te_hal.set_backend("picky")
    te_hal.set_policy(Policy(fallback=("fp32",)))
    out = torch.zeros(1)
    with pytest.warns(FallbackWarning):
        assert ops.amax(INPUT, out=out) is out
    assert trace.ran == ["fp32"]


def test_an_error_inside_supports_is_not_taken_for_a_no() -> None:
    def broken(call: Call) -> Support:
        raise KeyError(call.op)

    register_backend(stub("broken", supports=broken))
    register_backend(stub("silent", supports=lambda call: None))  # type: ignore[arg-type,return-value]  # noqa: ARG005
    te_hal.set_policy(Policy(fallback=("cpu_reference",)))
    with (
        te_hal.use_backend("broken"),
        pytest.raises(StateError, match=r"backend broken: supports: got KeyError") as error,
    ):
        ops.amax(INPUT)
    assert "for amax(input=torch.float32" in str(error.value)
    assert isinstance(error.value.__cause__, KeyError)
    with te_hal.use_backend("silent"), pytest.raises(StateError, match=r"backend silent: supports: got None"):
        ops.amax(INPUT)


def test_a_single_op_can_be_sent_elsewhere(trace: Trace) -> None:
    te_hal.set_backend("fp32")
    te_hal.set_policy(Policy(per_op={"amax": "other"}))
    ops.amax(INPUT)
    with te_hal.use_policy(Policy()):
        ops.amax(INPUT)
    assert trace.ran == ["other", "fp32"]
    assert te_hal.fallback_report() == {}


@pytest.mark.usefixtures("trace")
def test_an_op_sent_elsewhere_refuses_a_device_that_is_not_served_there() -> None:
    te_hal.set_policy(Policy(per_op={"amax": "elsewhere"}))
    with pytest.raises(BackendUnavailableError, match=r"te_hal.set_policy: got tensors on cpu for .*'elsewhere'"):
        ops.amax(INPUT)


def test_scopes_of_policy_and_backend_nest_in_either_order(trace: Trace) -> None:
    policy = Policy(fallback=("fp32",))
    with te_hal.use_policy(policy), te_hal.use_backend("picky"):
        assert te_hal.get_policy() == policy
        with pytest.warns(FallbackWarning):
            ops.amax(INPUT)
    with te_hal.use_backend("picky"), te_hal.use_policy(policy):
        ops.amax(INPUT)
    assert te_hal.get_policy() == Policy()
    assert trace.ran == ["fp32", "fp32"]


WRONG_POLICIES = {
    "unknown_op": (Policy(per_op={"gemmm": "fp32"}), ArgumentError, "'gemmm'; accepted: .*gemm,"),
    "unknown_backend": (Policy(per_op={"amax": "muse"}), BackendNotFoundError, "'muse'; accepted: .*fp32"),
    "unknown_fallback": (Policy(fallback=("muse",)), BackendNotFoundError, "'muse'; accepted: .*fp32"),
    "unusable_backend": (Policy(per_op={"amax": "dead"}), BackendUnavailableError, "is unplugged"),
    "backend_without_the_op": (Policy(per_op={"gemm": "fp32"}), UnsupportedError, "'gemm' sent to .*'fp32'"),
    "not_a_policy": ({"amax": "fp32"}, ArgumentTypeError, "got a dict; accepted: a te_hal.Policy"),
}


@pytest.mark.usefixtures("trace")
@pytest.mark.parametrize("case", WRONG_POLICIES)
def test_a_policy_that_cannot_be_kept_is_refused_and_the_old_one_stays(case: str) -> None:
    policy, error, named = WRONG_POLICIES[case]
    with pytest.raises(error, match=named):
        te_hal.set_policy(policy)  # type: ignore[arg-type]
    with pytest.raises(error, match=named), te_hal.use_policy(policy):  # type: ignore[arg-type]
        pass
    assert te_hal.get_policy() == Policy()


MALFORMED = {
    "fallback_is_text": {"fallback": "cpu_reference"},
    "fallback_holds_a_number": {"fallback": (1,)},
    "fallback_is_none": {"fallback": None},
    "per_op_is_a_list": {"per_op": ["amax"]},
    "per_op_maps_to_none": {"per_op": {"amax": None}},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_policy_is_refused_when_it_is_built(case: str) -> None:
    with pytest.raises(ArgumentError, match=r"Policy: (fallback|per_op): got"):
        Policy(**MALFORMED[case])  # type: ignore[arg-type]


def test_a_policy_is_a_value() -> None:
    per_op = {"amax": "null"}
    policy = Policy(per_op=per_op, fallback=["null"])  # type: ignore[arg-type]
    per_op["gemm"] = "null"
    assert policy == Policy(per_op={"amax": "null"}, fallback=("null",))
    assert hash(policy) == hash(Policy(per_op={"amax": "null"}, fallback=("null",)))
    assert pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(TypeError):
        policy.per_op["gemm"] = "null"  # type: ignore[index]


@pytest.mark.usefixtures("trace")
def test_resolve_tells_who_runs() -> None:
    te_hal.set_backend("picky")
    te_hal.set_policy(Policy(fallback=("dead", "fp32")))
    with pytest.warns(FallbackWarning):
        found = resolve(AMAX)
    assert found.backend.name == "fp32"


def test_an_optional_op_without_a_kernel_is_composed_and_its_parts_are_dispatched(trace: Trace) -> None:
    te_hal.set_backend("fp32")
    call = Call("bias_grad", torch.device("cpu"), {"grad_output": torch.float32}, {"out_dtype": None})
    found = resolve(call)
    assert inspect.unwrap(found.kernel) is registry.REGISTRY.compositions["bias_grad"].function
    assert found.backend.name == "fp32"
    assert ops.bias_grad(torch.ones(4, 2)).tolist() == [4.0, 4.0]
    assert trace.ran == []


def test_an_optional_op_is_composed_before_anybody_else_is_asked(trace: Trace) -> None:
    def bias_grad(grad_output: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        trace.ran.append("kernel")
        return grad_output.sum(0, dtype=out_dtype)

    register_backend(stub("says_no", kernels={"bias_grad": bias_grad}, supports=refuse("not today")))
    register_backend(stub("says_yes", kernels={"bias_grad": bias_grad}, supports=yes))
    te_hal.set_policy(Policy(fallback=("says_yes",)))
    with te_hal.use_backend("says_no"):
        ops.bias_grad(torch.ones(4, 2))
    assert trace.ran == []
    with te_hal.use_backend("says_yes"):
        ops.bias_grad(torch.ones(4, 2))
    assert trace.ran == ["kernel"]


@pytest.mark.usefixtures("trace")
def test_reset_forgets_counts_warnings_and_policy() -> None:
    for _ in range(2):
        register_backend(stub("no_fp32", supports=refuse("does not do fp32")))
        te_hal.set_backend("no_fp32")
        te_hal.set_policy(Policy(fallback=("cpu_reference",)))
        with pytest.warns(FallbackWarning):
            ops.amax(INPUT)
        te_hal.reset()
        assert te_hal.fallback_report() == {}
        assert te_hal.get_policy() == Policy()
