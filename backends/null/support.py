"""What the null backend answers: yes to every call whose result the schema describes."""

from __future__ import annotations

from te_hal.schema.gemm import pairing
from te_hal.schema.support import SUPPORTED, Call, Support


def supports(call: Call) -> Support:
    """No to products of operands that do not go together."""
    return pairing(call) if call.op == "gemm" else SUPPORTED
