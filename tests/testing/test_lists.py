"""unsupported.toml and xfail.toml: every entry has its reason, is borne out, and holds for what it names."""

from __future__ import annotations

import pytest
import torch
from faulty_backends import FAULTS, REFERENCE, faulty, refuses_what_nobody_listed, same

from te_hal.schema.errors import ArgumentError
from te_hal.testing import Case, Kind, Lists, Status, Tested, cases, run_case

CPU = torch.device("cpu")
ENTRY = '[[unsupported]]\nop = "softmax_fwd"\nwhere = {{ mask = "bool" }}\nreason = "{reason}"\n'
MASKED = "softmax_fwd:mask=bool"


def lists_of(folder, *, unsupported: str = "", xfail: str = "") -> Lists:
    (folder / "unsupported.toml").write_text(unsupported)
    (folder / "xfail.toml").write_text(xfail)
    return Lists.in_folder(folder)


def test_a_refusal_that_is_listed_is_admitted_with_its_reason(tmp_path):
    lists = lists_of(tmp_path, unsupported=ENTRY.format(reason="no mask yet"))
    backend = faulty("softmax_fwd", same, refuses_what_nobody_listed)
    outcome = run_case(Tested(backend, CPU, lists), Case.of(MASKED))
    assert (outcome.status, outcome.reason) == (Status.UNSUPPORTED, "no mask yet (takes no mask)")
    assert lists.stale([outcome]) == []


def test_an_entry_for_what_is_supported_is_stale(tmp_path):
    lists = lists_of(tmp_path, unsupported=ENTRY.format(reason="no mask yet"))
    outcome = run_case(Tested(REFERENCE, CPU, lists), Case.of(MASKED))
    assert outcome.status is Status.PASSED
    (sentence,) = lists.stale([outcome])
    assert "unsupported.toml#1 (op softmax_fwd): no case is refused for it" in sentence


def test_an_entry_that_depends_on_the_device_is_not_stale(tmp_path):
    lists = lists_of(tmp_path, unsupported=ENTRY.format(reason="old devices") + "sometimes = true\n")
    assert lists.stale([]) == []


def test_a_known_failure_is_expected_and_one_that_is_gone_is_stale(tmp_path):
    fault = FAULTS["rmsnorm off by 1%"]
    lists = lists_of(tmp_path, xfail='[[xfail]]\nop = "rmsnorm_.*"\nreason = "ticket 7"\n')
    case = Case.of("rmsnorm_fwd:everyday")
    failing = run_case(Tested(fault.backend(), CPU, lists), case)
    assert (failing.status, failing.reason) == (Status.EXPECTED, "ticket 7")
    assert failing.findings
    assert lists.stale([failing]) == []
    passing = run_case(Tested(REFERENCE, CPU, lists), case)
    (sentence,) = lists.stale([passing])
    assert "every case of it passes" in sentence


def test_a_refusal_at_run_time_is_no_refusal_that_a_list_excuses(tmp_path):
    lists = lists_of(tmp_path, unsupported='[[unsupported]]\nop = "gemm"\nreason = "not yet"\n')
    outcome = run_case(Tested(FAULTS["capability lie"].backend(), CPU, lists), Case.of("gemm:layout=wgrad"))
    assert [finding.kind for finding in outcome.findings] == [Kind.LIE]
    assert outcome.status is Status.FAILED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[unsupported]]\nop = "amax"\n', "an entry with op and reason"),
        ('[[unsupported]]\nop = "amax"\nreason = " "\n', "an entry with op and reason"),
        ('[[unsupported]]\nop = "amax"\nreason = "x"\nwhy = "y"\n', "why = 'y'"),
        ('[[unsupported]]\nop = 7\nreason = "x"\n', "op = 7"),
        ('[[xfail]]\nop = "amax"\nreason = "x"\n', "got xfail"),
        ("[[unsupported]\n", "no TOML"),
        ('[[unsupported]]\nop = "amaxx"\nreason = "x"\n', "op = 'amaxx', which no op matches whole"),
        ('[[unsupported]]\nop = "am(ax"\nreason = "x"\n', "an expression that is none"),
        ('[[unsupported]]\nop = "amax"\nwhere = { msk = "bool" }\nreason = "x"\n', "axis msk, which amax lacks"),
        ('[[unsupported]]\nop = "amax"\nwhere = { shape = "(" }\nreason = "x"\n', "an expression that is none"),
        ('[[unsupported]]\nop = "amax"\nwhere = { shape = 1 }\nreason = "x"\n', "a regular expression, as text"),
    ],
)
def test_a_list_that_is_wrong_is_refused(tmp_path, text, words):
    with pytest.raises(ArgumentError, match=words):
        lists_of(tmp_path, unsupported=text)


def test_backends_that_share_kernels_share_a_list():
    reasons = {name: {entry.reason for entry in Lists.of(name).refused} for name in ("musa", "cuda", "musa_emulator")}
    assert reasons["musa"] == reasons["cuda"] == reasons["musa_emulator"] != set()
    assert Lists.of("cpu_reference") == Lists.of("nobody") == Lists()


def test_a_kernel_that_the_contract_asks_for_and_that_is_missing_must_be_listed():
    kernels = {op: kernel for op, kernel in REFERENCE.kernels.items() if op != "amax"}
    backend = faulty("gemm", same)
    backend = type(backend)(name="faulty", kernels=kernels, serves=backend.serves, supports=backend.supports)
    outcome = run_case(Tested(backend, CPU, Lists()), cases("amax")[0])
    assert [finding.kind for finding in outcome.findings] == [Kind.UNLISTED]
