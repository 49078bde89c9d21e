"""te_hal.why_not: each implementation that does not run an op or a model, with its reason; the policy's too."""

import json

import pytest
import torch
from stub_backends import refuse, stub

import te_hal
import te_hal.modules as te
from te_hal import Policy, recipe
from te_hal.dispatch import register_backend
from te_hal.schema.errors import ArgumentError, ArgumentTypeError


def sentences(found: te_hal.explaining.WhyNot) -> dict[str, str]:
    return {reason.backend: reason.sentence for reason in found.reasons}


def test_each_backend_but_the_one_that_runs_has_a_reason() -> None:
    register_backend(stub("picky", supports=refuse("it is Sunday")))
    found = te_hal.why_not("amax")
    assert sentences(found)["picky"] == "it is Sunday"
    assert sentences(found)["null"] == "could, but cpu_reference is asked first (its claim on cpu)"
    assert set(found.backends) - set(sentences(found)) == {"cpu_reference"}
    assert "cpu_reference: runs it" in str(found)


def test_one_backend_may_be_asked_about() -> None:
    with te_hal.use_backend("null"):
        found = te_hal.why_not("gemm", backend="cpu_reference", a="e4m3", b="e4m3")
    assert str(found) == "cpu_reference: could, but null is asked first (te_hal.use_backend)"
    assert found.reasons[0].runs_on.startswith("null")


POLICIES = {
    "deny": (Policy(deny={"amax": ("null",)}), "null", "may not run amax: te_hal.use_policy denies it"),
    "allow": (Policy(allow={"amax": ("cpu_reference",)}), "null", "may not run amax: te_hal.use_policy allows others"),
    "order": (Policy(order={"amax": ("null",)}), "cpu_reference", "null is asked first (order of te_hal.use_policy)"),
    "per_op": (Policy(per_op={"amax": "null"}), "cpu_reference", "null is asked first (per_op of te_hal.use_policy)"),
}


@pytest.mark.parametrize("case", POLICIES)
def test_the_policy_is_a_reason(case) -> None:
    policy, backend, reason = POLICIES[case]
    with te_hal.use_policy(policy):
        assert reason in str(te_hal.why_not("amax", backend=backend))


def test_explain_shows_the_policys_reasons() -> None:
    with te_hal.use_policy(Policy(deny={"amax": ("cpu_reference",)}, fallback=("null",))):
        text = str(te_hal.explain("amax"))
    assert "runs on null: a fallback that the policy allows" in text
    assert "because cpu_reference may not run amax: te_hal.use_policy denies it" in text
    assert "asked first: cpu_reference, by its claim on cpu" in text
    assert "    cpu_reference: no, may not run amax: te_hal.use_policy denies it" in text


def test_a_model_is_asked_for_the_calls_it_has_seen() -> None:
    model = torch.nn.Sequential(te.Linear(32, 64), te.LayerNormLinear(64, 32)).bfloat16()
    assert "run a forward first" in str(te_hal.why_not(model))
    with te.autocast(recipe=recipe.DelayedScaling()):
        model(torch.randn(16, 32).bfloat16()).sum().backward()
    with te_hal.use_policy(Policy(deny={"gemm": ("musa_emulator",)})):
        found = te_hal.why_not(model, backend="musa_emulator")
        text = str(found)
    denied = [reason for reason in found.reasons if "denies it" in reason.sentence]
    assert {reason.call.split("(")[0] for reason in denied} == {"gemm"}
    assert denied[0].modules == ("0", "1")
    assert f"does not run {found.calls} of {found.calls} calls" in text
    assert text.count("denies it") == 1
    assert "(in 0, 1)" in text
    assert str(te_hal.why_not(model, backend="cpu_reference")) == f"cpu_reference: runs all {found.calls} calls"
    assert json.loads(json.dumps(found.as_dict()))["calls"] == found.calls


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"got backend 'muse'; accepted: cpu_reference"):
        te_hal.why_not("gemm", backend="muse")
    with pytest.raises(ArgumentError, match="run a forward first"):
        te_hal.why_not(torch.nn.ReLU(), device="cpu")
    with pytest.raises(ArgumentTypeError, match="an op's name"):
        te_hal.why_not(3)  # type: ignore[arg-type]
