"""The certificate: what a full run of the kit found, as JSON, from which docs/support.md is made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import te_hal
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.op import REQUIRED
from te_hal.testing.finding import Status

if TYPE_CHECKING:
    from te_hal.testing.finding import Outcome
    from te_hal.testing.session import Session

#: Grows when a field changes its meaning.
FORMAT = 1
_TEXTS = frozenset({"doc", "summary", "reason", "sentence"})


def certify(session: Session) -> dict[str, Any]:
    """What a session found, as plain data.

    ``ops`` has per op the hash of its schema, the cases by how they ended, and the worst error as a share of what the
    contract allows (None where bytes are compared). ``clean`` is whether the backend may claim conformance, in all ops
    but those of ``missing``, of which it refuses every case.
    ``digest`` is over everything else: an edited certificate no longer has it.
    """
    document = {
        "format": FORMAT,
        "backend": session.subject.backend,
        "clean": session.clean,
        "tier": session.tier,
        "versions": {"te_hal": te_hal.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": device_name(session.subject.device),
        "machine": platform.machine(),
        "seconds": round(session.seconds),
        "ops": {op: _op(session, op) for op in SCHEMAS if session.counts(op)},
        "missing": list(session.missing),
        "refused": _reasons(session, Status.UNSUPPORTED),
        "expected_failures": _reasons(session, Status.EXPECTED),
        "failures": [
            {"case": o.case, "findings": [str(f) for f in o.findings]}
            for o in session.outcomes
            if o.status is Status.FAILED
        ],
        "stale": list(session.stale),
    }
    return {**document, "digest": digest(document)}


def _op(session: Session, op: str) -> dict[str, Any]:
    mine = [outcome for outcome in session.outcomes if outcome.op == op]
    measured = [outcome for outcome in mine if outcome.error is not None]
    worst = max(measured, key=lambda outcome: outcome.error or 0.0, default=None)
    return {
        "schema": schema_hash(op),
        "cases": {status.value: count for status, count in sorted(session.counts(op).items())},
        "watched": sum(outcome.watched for outcome in mine),
        "worst": None if worst is None else {"share_of_bound": round(worst.error or 0.0, 3), "case": worst.case},
    }


def _reasons(session: Session, status: Status) -> dict[str, int]:
    found: dict[str, int] = {}
    for outcome in session.outcomes:
        if outcome.status is status:
            reason = _reason(outcome)
            found[reason] = found.get(reason, 0) + 1
    return found


def _reason(outcome: Outcome) -> str:
    return f"{outcome.op}: {outcome.reason.split(' (')[0]}"


def device_name(device: str) -> str:
    """What the device calls itself; the CPU is only that."""
    kind = torch.device(device)
    if kind.type == "cpu":
        return "cpu"
    return f"{kind.type} ({torch.get_device_module(kind).get_device_name(kind)})"


def schema_hash(op: str) -> str:
    """Sixteen hex digits that change with anything in an op's schema that a case may depend on."""
    return hashlib.sha256(json.dumps(_plain(SCHEMAS[op])).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a schema holds
    """Of what a schema holds, in an order that is the same in every process; texts for readers are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.name not in _TEXTS]
        return {name: _plain(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return sorted(([_plain(key), _plain(item)] for key, item in value.items()), key=str)
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is REQUIRED:
        return "required"
    return str(getattr(value, "value", value))


def digest(document: dict[str, Any]) -> str:
    """SHA-256 over the certificate without its digest, keys sorted."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def stale_ops(document: dict[str, Any]) -> list[str]:
    """Ops of a certificate whose schema has changed since, or that are gone."""
    return [op for op, found in document["ops"].items() if op not in SCHEMAS or found["schema"] != schema_hash(op)]
