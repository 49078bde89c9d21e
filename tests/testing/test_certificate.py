"""Certificates: what they hold, that an edited one is noticed, and that a changed schema makes one stale."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from faulty_backends import FAULTS, REFERENCE

from te_hal.schema.catalog import SCHEMAS
from te_hal.testing import Case, Lists, Session, Subject, Tested, certify, describe, run_case
from te_hal.testing.certificate import digest, schema_hash, stale_ops
from te_hal.testing.session import conformance


def session_of(backend, *ids: str) -> Session:
    tested = Tested(backend, torch.device("cpu"), Lists())
    return Session(
        Subject(backend.name, "cpu"), "chosen", tuple(run_case(tested, Case.of(text)) for text in ids), (), 1.0
    )


@pytest.fixture
def document():
    return certify(session_of(REFERENCE, "amax:everyday", "gemm:everyday", "gemm:layout=dgrad"))


def test_a_certificate_has_the_cases_and_the_worst_error_of_each_op(document):
    assert document["clean"]
    assert document["ops"]["gemm"]["cases"] == {"passed": 2}
    assert 0 < document["ops"]["gemm"]["worst"]["share_of_bound"] < 1
    assert document["ops"]["amax"]["worst"] is None
    assert document["versions"]["torch"] == torch.__version__


def test_a_failure_is_in_the_certificate_and_in_the_report():
    session = session_of(FAULTS["rmsnorm off by 1%"].backend(), "rmsnorm_fwd:everyday")
    found = certify(session)
    assert not found["clean"]
    assert found["failures"][0]["case"] == "rmsnorm_fwd:everyday"
    assert "--case 'rmsnorm_fwd:everyday'" in describe(session)
    assert "does NOT conform" in describe(session)


def test_an_edited_certificate_no_longer_has_its_digest(document):
    again = json.loads(json.dumps(document))
    assert digest(again) == again["digest"]
    again["ops"]["gemm"]["cases"]["passed"] = 3
    assert digest(again) != again["digest"]


def test_a_changed_contract_makes_an_op_stale_and_a_changed_text_does_not(document, monkeypatch):
    gemm = SCHEMAS["gemm"]
    monkeypatch.setitem(SCHEMAS, "gemm", dataclasses.replace(gemm, summary="another text"))
    assert stale_ops(document) == []
    contract = dataclasses.replace(gemm.contract, bound={torch.float32: 1.0})
    monkeypatch.setitem(SCHEMAS, "gemm", dataclasses.replace(gemm, contract=contract))
    assert stale_ops(document) == ["gemm"]


def test_every_op_has_a_hash_of_its_own():
    assert len({schema_hash(op) for op in SCHEMAS}) == len(SCHEMAS)


def test_the_device_is_the_one_that_ran_and_not_the_one_asked_for():
    session = conformance(Subject("cpu_reference"), op="compute_scale", quick=True, jobs=0)
    assert session.subject.device == "cpu"
    assert certify(session)["device"] == "cpu"
