"""Case B92: an op that a backend gets wrong is taken from it: allow, deny and order, per op and for every op."""

import pickle

import pytest
import torch
from stub_backends import amax_that, refuse, stub

import te_hal
from te_hal import Policy, ops
from te_hal.dispatch import FallbackWarning, backend_for, register_backend
from te_hal.schema.errors import (
    ArgumentError,
    BackendNotFoundError,
    BackendUnavailableError,
    UnsupportedError,
)
from te_hal.schema.support import Code, Support

INPUT = torch.ones(3)
CPU = torch.device("cpu")


@pytest.fixture
def ran() -> list[str]:
    """Who ran amax or bias_grad: `one`, `two`; `picky` says no, `dead` is unusable, `far` serves no CPU."""
    found: list[str] = []

    def kernels(name):
        def bias_grad(grad_output, *, out_dtype=None):
            found.append(name)
            return grad_output.sum(0, dtype=out_dtype)

        return {"amax": amax_that(lambda _: found.append(name)), "bias_grad": bias_grad}

    for name, fields in {
        "one": {},
        "two": {},
        "picky": {"supports": refuse("not today")},
        "dead": {"usable": lambda: Support.no(Code.ENVIRONMENT, "is unplugged")},
        "far": {"serves": ("meta",)},
    }.items():
        register_backend(stub(name, kernels=kernels(name), **fields))
    return found


def test_a_denied_op_is_refused_with_the_policy_as_the_reason(ran) -> None:
    te_hal.set_backend("one")
    te_hal.set_policy(Policy(deny={"amax": ("one",)}))
    with pytest.raises(UnsupportedError, match=r"one: may not run amax: te_hal.set_policy denies it"):
        ops.amax(INPUT)
    ops.bias_grad(torch.ones(2, 2))
    assert ran == ["one"]


def test_a_denied_op_goes_to_the_fallback_counted_and_announced(ran) -> None:
    te_hal.set_backend("one")
    te_hal.set_policy(Policy(deny={"amax": ("one",)}, fallback=("two",)))
    with pytest.warns(FallbackWarning, match="denies it"):
        ops.amax(INPUT)
    assert ran == ["two"]
    assert te_hal.fallback_report() == {("amax", "one", "two"): 1}


def test_a_denied_optional_op_is_composed(ran) -> None:
    te_hal.set_backend("one")
    te_hal.set_policy(Policy(deny={"bias_grad": ("one",)}))
    assert ops.bias_grad(torch.ones(2, 2)).tolist() == [2.0, 2.0]
    assert ran == []


def test_a_fallback_that_is_denied_is_passed_over(ran) -> None:
    te_hal.set_backend("picky")
    te_hal.set_policy(Policy(deny={"amax": ("one",)}, fallback=("one", "two")))
    with pytest.warns(FallbackWarning):
        ops.amax(INPUT)
    assert ran == ["two"]


def test_only_allowed_backends_run_an_op_and_an_ops_own_entry_counts(ran) -> None:
    te_hal.set_backend("one")
    te_hal.set_policy(Policy(allow={"*": ("two",), "bias_grad": ("one", "two")}))
    ops.bias_grad(torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match=r"te_hal.set_policy allows others only"):
        ops.amax(INPUT)
    assert ran == ["one"]


@pytest.mark.parametrize("policy", [Policy(deny=("cpu_reference",)), Policy(allow=("one",))], ids=["deny", "allow"])
def test_a_backend_that_is_kept_from_every_op_claims_no_device(policy, ran) -> None:
    register_backend(stub("claims", default_for=("cpu",)))
    with pytest.raises(BackendUnavailableError, match="2 backends"):
        ops.amax(INPUT)
    te_hal.set_policy(Policy(deny=("cpu_reference",)))
    assert backend_for(CPU).name == "claims"
    te_hal.set_policy(Policy(deny=("cpu_reference", "claims")))
    with pytest.raises(BackendUnavailableError, match=r"none that claims it \(but .*claims, kept from it by deny"):
        ops.amax(INPUT)
    te_hal.set_policy(policy)
    assert ran == []


ORDERS = {
    "the first": (("one", "two"), "one"),
    "another order": (("two", "one"), "two"),
    "an unusable one is passed over": (("dead", "two"), "two"),
    "one of another device is passed over": (("far", "one"), "one"),
}


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.parametrize("op", ["amax", "*"])
def test_the_first_in_the_order_that_works_here_runs_the_op(op, case, ran) -> None:
    order, runs = ORDERS[case]
    te_hal.set_policy(Policy(order={op: order}))
    ops.amax(INPUT)
    assert ran == [runs]
    assert te_hal.fallback_report() == {}


def test_the_order_of_an_op_beats_a_forced_backend_and_that_of_every_op_does_not(ran) -> None:
    te_hal.set_backend("one")
    te_hal.set_policy(Policy(order={"*": ("two",)}))
    ops.amax(INPUT)
    te_hal.set_policy(Policy(order={"amax": ("two",)}))
    ops.amax(INPUT)
    assert ran == ["one", "two"]


def test_an_order_of_every_op_leaves_other_devices_to_their_own(ran) -> None:
    te_hal.set_policy(Policy(order=("far",)))
    assert backend_for(CPU, "amax").name == "cpu_reference"
    assert ran == []


def test_what_is_denied_is_passed_over_in_an_order_and_no_allow_brings_it_back(ran) -> None:
    te_hal.set_policy(Policy(order=("one", "two"), deny=("one",), allow={"amax": ("one", "two")}))
    ops.amax(INPUT)
    assert ran == ["two"]


def test_an_order_without_anybody_who_works_says_why_of_each(ran) -> None:
    te_hal.set_policy(Policy(order={"amax": ("dead", "far")}))
    with pytest.raises(BackendUnavailableError, match="dead: is unplugged; far: does not serve cpu"):
        ops.amax(INPUT)
    assert ran == []


def test_a_call_that_the_first_in_the_order_refuses_is_no_matter_of_order(ran) -> None:
    te_hal.set_policy(Policy(order={"amax": ("picky", "one")}))
    with pytest.raises(UnsupportedError, match="not today"):
        ops.amax(INPUT)
    assert ran == []


def test_an_op_may_have_other_fallbacks_or_none(ran) -> None:
    te_hal.set_backend("picky")
    te_hal.set_policy(Policy(fallback=("one",), fallback_per_op={"amax": ("two",)}))
    with pytest.warns(FallbackWarning):
        ops.amax(INPUT)
    te_hal.set_policy(Policy(fallback=("one",), fallback_per_op={"amax": ()}))
    with pytest.raises(UnsupportedError):
        ops.amax(INPUT)
    assert ran == ["two"]


WRONG = {
    "order is text": {"order": "one"},
    "order of text": {"order": {"amax": "one"}},
    "deny holds a number": {"deny": {"amax": (1,)}},
    "allow maps a number": {"allow": {3: ("one",)}},
    "deny names one twice": {"deny": ("one", "one")},
    "fallback_per_op without ops": {"fallback_per_op": ("one",)},
    "fallback_per_op of every op": {"fallback_per_op": {"*": ("one",)}},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_malformed_policy_is_refused_naming_the_field(case) -> None:
    with pytest.raises(ArgumentError, match=rf"Policy: {case.split()[0]}\b.*; accepted: "):
        Policy(**WRONG[case])


UNKNOWN = {
    "order": (Policy(order={"amaxx": ("one",)}), ArgumentError, "order: got op 'amaxx'; accepted: .*gemm"),
    "deny": (Policy(deny=("muse",)), BackendNotFoundError, "deny: got backend 'muse'; accepted: .*one"),
    "allow": (Policy(allow={"amax": ("muse",)}), BackendNotFoundError, "allow: got backend 'muse'"),
    "fallback": (Policy(fallback_per_op={"amax": ("muse",)}), BackendNotFoundError, "per_op: got backend 'muse'"),
    "per_op": (Policy(per_op={"*": "one"}), ArgumentError, "per_op: got '\\*'; accepted: names of ops"),
    "barred": (Policy(per_op={"amax": "one"}, deny=("one",)), UnsupportedError, "'one', which the policy's deny"),
}


@pytest.mark.usefixtures("ran")
@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_names_are_reported_and_the_old_policy_stays(case) -> None:
    policy, error, named = UNKNOWN[case]
    with pytest.raises(error, match=named):
        te_hal.set_policy(policy)
    assert te_hal.get_policy() == Policy()


def test_a_policy_with_lists_is_a_value() -> None:
    policy = Policy(order={"amax": ["one"]}, deny=["two"], fallback_per_op={"gemm": []})
    same = Policy(order={"amax": ("one",)}, deny={"*": ("two",)}, fallback_per_op={"gemm": ()})
    assert (policy, hash(policy)) == (same, hash(same))
    assert pickle.loads(pickle.dumps(policy)) == same
    assert policy != Policy(order={"amax": ("one",)}, allow={"*": ("two",)}, fallback_per_op={"gemm": ()})
