"""What a case is due to give: every result by name, and how it is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from te_hal import ops
from te_hal.dispatch import use_backend
from te_hal.schema.storage import QuantizedStorage
from te_hal.testing.oracles import activations, norms, products, softmax  # noqa: F401 - they register their oracles
from te_hal.testing.oracles.bounded import BOUNDED, Due
from te_hal.testing.oracles.exact import EXACT

if TYPE_CHECKING:
    from te_hal.schema.op import OpSchema
    from te_hal.testing.case import Case

#: The backend that stands for the rules where the kit has no oracle of its own.
REFERENCE = "cpu_reference"


@dataclass
class Expected:
    """What is due.

    Attributes:
        exact: results whose bytes are fixed, by name: tensors, arrays, storages, or a storage's copies.
        bounded: results that may be off by the contract's bound.
        near: results of a cast behind a computation, whose codes may be off as the contract says.
        source: who says so, for the certificate.
    """

    exact: dict[str, Any] = field(default_factory=dict)
    bounded: dict[str, Due] = field(default_factory=dict)
    near: dict[str, Any] = field(default_factory=dict)
    source: str = "oracle"

    @property
    def sources(self) -> int:
        """How many computations a bounded result is apart from the exact one: cpu_reference's is one itself."""
        return 2 if self.source == REFERENCE else 1


def expected(case: Case) -> Expected:
    """What a case is due to give: by the kit's own oracle, else by cpu_reference.

    Casts behind a computation (``Contract.codes_off``) are those of cpu_reference: the contract is the composition.
    """
    return expected_of(case.schema, case.arguments())


def expected_of(schema: OpSchema, given: dict[str, Any]) -> Expected:
    """As :func:`expected`, of arguments on the CPU."""
    if schema.contract.exact and schema.name in EXACT:
        return Expected(exact=EXACT[schema.name](given))
    if schema.name in BOUNDED and schema.contract.codes_off is None:
        return Expected(bounded=BOUNDED[schema.name](given))
    return _by_reference(schema, given)


def _by_reference(schema: OpSchema, given: dict[str, Any]) -> Expected:
    positional, keywords = schema.split(given)
    with use_backend(REFERENCE):
        result = getattr(ops, schema.name)(*positional, **keywords)
    found = named(schema, result, given)
    if schema.contract.exact:
        return Expected(exact=found, source=REFERENCE)
    if schema.contract.codes_off is None:
        return Expected(bounded={n: Due(t.double(), t.double().abs()) for n, t in found.items()}, source=REFERENCE)
    near = {name: value for name, value in found.items() if isinstance(value, QuantizedStorage) or name == "amax"}
    rest = {name: Due(t.double(), _size(schema, name, t, given)) for name, t in found.items() if name not in near}
    return Expected(near=near, bounded=rest, source=REFERENCE)


def _size(schema: OpSchema, name: str, value: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Magnitude of a result beside a cast: a sum over rows is made of terms that cancel, a statistic is not."""
    if name != "grad_bias" or schema.name != "bias_grad_quantize":
        spread = value.double().abs()
        known = spread[spread.isfinite()]
        return spread + known.mean() if known.numel() else spread
    size: torch.Tensor = given["grad_output"].double().abs().sum(0)
    return size


def misfit(schema: OpSchema, result: Any) -> str:  # noqa: ANN401 - whatever a kernel gives
    """What keeps a result from being read as the op's outputs; empty: nothing."""
    results = result if isinstance(result, tuple) else (result,)
    names = ", ".join(output.name for output in schema.outputs)
    if schema.outputs and len(results) != len(schema.outputs):
        return f"{len(results)} results; due are {len(schema.outputs)}: {names}"
    for output, value in zip(schema.outputs, results, strict=False):
        if value is not None and not isinstance(value, (torch.Tensor, QuantizedStorage)):
            return f"result {output.name} is a {type(value).__name__}; due is a tensor or a QuantizedStorage"
    return ""


def named(schema: OpSchema, result: Any, arguments: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - as the op has it
    """Results and written operands by name; what is None is left out."""
    found: dict[str, Any] = {}
    results = result if isinstance(result, tuple) else (result,)
    if schema.outputs:
        found = {o.name: value for o, value in zip(schema.outputs, results, strict=True) if value is not None}
    for operand in schema.operands:
        value = arguments[operand.name]
        if not operand.written or value is None:
            continue
        if operand.many:
            found |= {f"{operand.name}[{index}]": item for index, item in enumerate(value)}
        else:
            found[operand.name] = value
    return found
