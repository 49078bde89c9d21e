"""Mode grad: what the backward ops give, against differences of the forward in float64 along a random direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import ask_declared
from te_hal.schema.activation import ACTIVATIONS, GATED
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.validate import describe_call
from te_hal.testing.execute import attempt
from te_hal.testing.finding import Finding, Kind, Outcome, Status
from te_hal.testing.oracles.activations import activated
from te_hal.testing.oracles.norms import normalised
from te_hal.testing.oracles.softmax import probabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_hal.testing.execute import Tested

    Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]

#: Step of the differences, in float64 and relative to everyday values; their own error is its square.
_STEP = 1e-4
#: Of fp32 results, as a share of the sum of their terms' magnitudes.
_ALLOWED = 1e-5
_ROWS, _COLS = 24, 40


class Slope(NamedTuple):
    """One backward call and the function whose slope it should give.

    Attributes:
        id: op and setting.
        op: name of the backward op.
        given: its operands and flags by name.
        forward: the function, of the variables by name, in float64.
        variables: where it is taken.
        grad_output: what multiplies its result.
        results: position of each variable's gradient among the op's results.
    """

    id: str
    op: str
    given: dict[str, Any]
    forward: Forward
    variables: dict[str, torch.Tensor]
    grad_output: torch.Tensor
    results: dict[str, int]


def check_gradients(tested: Tested, matches: Callable[[str], bool]) -> Iterator[Outcome]:
    """An outcome per backward op and setting, of the ops whose name matches."""
    for slope in _slopes():
        if matches(slope.op):
            yield _check(tested, slope)


def _check(tested: Tested, slope: Slope) -> Outcome:
    schema = SCHEMAS[slope.op]
    defaults = {flag.name: flag.default for flag in schema.flags} | {o.name: None for o in schema.operands}
    moved = {n: v.to(tested.device) if isinstance(v, torch.Tensor) else v for n, v in slope.given.items()}
    arguments = {**defaults, **moved}
    answer = ask_declared(tested.backend, describe_call(schema, arguments))
    if not answer:
        status = Status.COMPOSED if schema.optional else Status.UNSUPPORTED
        return Outcome(slope.id, slope.op, status, reason=answer.sentence)
    result, trouble = attempt(tested, schema, arguments)
    if trouble:
        return Outcome(slope.id, slope.op, Status.FAILED, (Finding(Kind.ERROR, trouble),))
    results = result if isinstance(result, tuple) else (result,)
    worst, findings = 0.0, []
    for name, position in slope.results.items():
        error = _error(slope, name, results[position].cpu().double()) / _ALLOWED
        worst = max(worst, error)
        if not error <= 1:
            sentence = f"the gradient of {name} is {error * _ALLOWED:.1e} from the slope, {_ALLOWED:.0e} is allowed"
            findings.append(Finding(Kind.VALUES, sentence))
    status = Status.FAILED if findings else Status.PASSED
    return Outcome(slope.id, slope.op, status, tuple(findings), error=worst)


def _error(slope: Slope, name: str, found: torch.Tensor) -> float:
    """Distance along a random direction, as a share of the terms."""
    value = slope.variables[name]
    direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ahead, behind = (
        (slope.forward({**slope.variables, name: value + step * direction}) * slope.grad_output).sum()
        for step in (_STEP, -_STEP)
    )
    difference = (ahead - behind) / (2 * _STEP)
    terms = (found * direction).abs().sum()
    return float(((found * direction).sum() - difference).abs() / terms)


def _slopes() -> Iterator[Slope]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    yield from _products(draw)
    for zero_centered in (False, True):
        yield _norm("layernorm_bwd", draw, zero_centered=zero_centered)
        yield _norm("rmsnorm_bwd", draw, zero_centered=zero_centered)
    x, grad = draw(_ROWS, _COLS), draw(_ROWS, _COLS)
    settings = {"scale": 0.7, "causal": "none", "window": (-1, -1), "mask": None}
    given = {"grad_output": grad, "output": probabilities({"input": x, **settings}).float(), "scale": 0.7}
    softmax: Forward = lambda v: probabilities({**settings, **v})  # noqa: E731
    yield Slope(
        "softmax_bwd:scale=0.7", "softmax_bwd", given, softmax, {"input": x.double()}, grad.double(), {"input": 0}
    )
    for activation in ACTIVATIONS:
        x = draw(_ROWS, 2 * _COLS if activation in GATED else _COLS)
        flags = {"activation": activation, "limit": None, "alpha": None, "glu_linear_offset": None}
        given = {"grad_output": grad, "input": x, "activation": activation}
        function: Forward = lambda v, flags=flags: activated(v["input"], flags)  # type: ignore[misc] # noqa: E731
        variables = {"input": x.double()}
        yield Slope(
            f"activation_bwd:activation={activation}",
            "activation_bwd",
            given,
            function,
            variables,
            grad.double(),
            {"input": 0},
        )


def _products(draw: Callable[..., torch.Tensor]) -> Iterator[Slope]:
    """Of fprop: what the layouts dgrad and wgrad give."""
    x, w, grad = draw(_ROWS, _COLS), draw(32, _COLS), draw(_ROWS, 32)
    fprop: Forward = lambda v: v["input"] @ v["weight"].t()  # noqa: E731
    variables = {"input": x.double(), "weight": w.double()}
    for layout, operands, variable in (("dgrad", (grad, w), "input"), ("wgrad", (grad, x), "weight")):
        given = {"a": operands[0], "b": operands[1], "layout": layout}
        yield Slope(f"gemm:layout={layout}", "gemm", given, fprop, variables, grad.double(), {variable: 0})


def _norm(op: str, draw: Callable[..., torch.Tensor], *, zero_centered: bool) -> Slope:
    x, weight, bias, grad = draw(_ROWS, _COLS), draw(_COLS), draw(_COLS), draw(_ROWS, _COLS)
    flags = {"epsilon": 1e-5, "zero_centered_gamma": zero_centered}
    variables = {"input": x.double(), "weight": weight.double()}
    statistics = {"rstd"}
    if op.startswith("layernorm"):
        variables["bias"] = bias.double()
        statistics = {"mean", "rstd"}
    saved = normalised({**variables, **flags})
    given = {"grad_output": grad, "input": x, "weight": weight, "zero_centered_gamma": zero_centered}
    given |= {name: saved[name].float() for name in statistics}
    forward: Forward = lambda v: normalised({**v, **flags})["output"]  # noqa: E731
    results = {name: position for position, name in enumerate(variables)}
    words = "zero_centered_gamma=true" if zero_centered else "everyday"
    return Slope(f"{op}:{words}", op, given, forward, variables, grad.double(), results)
