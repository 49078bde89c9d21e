"""Holds a result against what is due: shapes first, then NaN and infinities by position, then values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.schema.shapes import dtype_source, shape_source
from te_hal.schema.storage import QuantizedStorage
from te_hal.testing.finding import Finding, Kind
from te_hal.testing.parts import parts, unequal

if TYPE_CHECKING:
    from te_hal.schema.op import Contract, OpSchema
    from te_hal.testing.expectation import Expected
    from te_hal.testing.oracles.bounded import Due

#: Stored bits of the significand, and the exponent of the smallest normal number.
_SIGNIFICAND = {torch.float32: (23, -126), torch.float16: (10, -14), torch.bfloat16: (7, -126)}
#: From so many results on the contract's bound is one on the norm.
_ENOUGH = 256
#: Close to the largest number it is rounding that decides between it and infinity.
_NEARLY_INFINITE = 0.99
#: The code that a cast gives NaN (C3).
_NAN, _ANY_SIGN = 0x7F, 0x7F
_SIGN, _NAN_CODES = 0x80, {"E4M3": 0x7F, "E5M2": 0x7D, "E2M1": 0x08}
#: A sum of FP8 products in an FP8 unit, as a share of the bound of a 16-bit result.
_FP8_UNIT = 1 / 16


def result_findings(schema: OpSchema, found: dict[str, Any], arguments: dict[str, Any]) -> list[Finding]:
    """Shape, dtype and device of every result, and whether ``out`` itself came back."""
    findings = []
    variant = arguments[schema.variant] if schema.variant else None
    device = next(t.device for t in _flat(arguments.values()))
    for output in schema.outputs:
        value = found.get(output.name)
        if value is None:
            if output.when is None or arguments[output.when]:
                findings.append(Finding(Kind.RESULT, f"result {output.name} is None"))
            continue
        if _needs_grad(value):
            got = "requires grad; results never do, te_hal's autograd is made around the ops"
            findings.append(Finding(Kind.RESULT, f"{output.name} {got}"))
        shape = eval(shape_source(schema, output.shape, variant), {}, dict(arguments))  # noqa: S307 - the schema's
        dtype = output.dtype
        if isinstance(dtype, str):
            dtype = eval(dtype_source(schema, dtype), {}, dict(arguments))  # noqa: S307
        out = arguments.get("out")
        if out is not None:
            if value is not out:
                findings.append(Finding(Kind.RESULT, f"result {output.name} is not `out`, which was given"))
            continue
        held = value.format.dtype if isinstance(value, QuantizedStorage) else value.dtype
        if tuple(value.shape) != tuple(shape) or held != dtype or value.device != device:
            got = f"{tuple(value.shape)}, {held}, {value.device}"
            findings.append(Finding(Kind.RESULT, f"{output.name} is {got}; due is {tuple(shape)}, {dtype}, {device}"))
    return findings


def _needs_grad(value: torch.Tensor | QuantizedStorage) -> bool:
    tensors = value.tensors() if isinstance(value, QuantizedStorage) else (value,)
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _flat(values: Any) -> list[Any]:  # noqa: ANN401
    flat: list[Any] = []
    for value in values:
        flat += value if isinstance(value, list) else [value]
    return [value for value in flat if isinstance(value, (torch.Tensor, QuantizedStorage))]


def judge(
    case_values: str, schema: OpSchema, found: dict[str, Any], due: Expected, *, fp8: bool
) -> tuple[list[Finding], float | None]:
    """The findings about values, and the error as a share of the bound (None: every byte is fixed).

    Args:
        case_values: name of the pattern that the operands hold.
        schema: the op.
        found: results and written operands by name.
        due: what they are due to be.
        fp8: both operands of a product are quantized.
    """
    findings: list[Finding] = []
    worst: float | None = None
    everyday = case_values == "normal"
    for name, value in due.exact.items():
        findings += _exact(name, found.get(name), value)
    for name, value in due.near.items():
        findings += _near(name, found.get(name), value, schema.contract)
    for name, value in due.bounded.items():
        made, error = _bounded(name, found.get(name), value, _Allowed(schema.contract, due.sources, fp8), everyday)
        findings += made
        worst = error if worst is None or (error is not None and error > worst) else worst
    return findings, worst


def _missing(name: str) -> list[Finding]:
    return [Finding(Kind.RESULT, f"there is no {name}")]


def _exact(name: str, found: Any, due: Any) -> list[Finding]:  # noqa: ANN401
    if found is None:
        return _missing(name)
    findings = []
    for mine, theirs in zip(parts(name, found), parts(name, due), strict=True):
        if mine.tensor.dtype != theirs.tensor.dtype or mine.tensor.numel() != theirs.tensor.numel():
            got = f"{tuple(mine.tensor.shape)} {mine.tensor.dtype}"
            findings.append(
                Finding(Kind.RESULT, f"{mine.label} is {got}, not {tuple(theirs.tensor.shape)} {theirs.tensor.dtype}")
            )
            continue
        expected = theirs.tensor.reshape(mine.tensor.shape)
        differ = unequal(mine.tensor, expected)
        if differ.any():
            findings.append(_difference(mine.label, mine.tensor, expected, differ))
    return findings


def _difference(label: str, found: torch.Tensor, due: torch.Tensor, differ: torch.Tensor) -> Finding:
    place = tuple(int(i) for i in differ.nonzero()[0])
    kind = Kind.VALUES
    if found.is_floating_point() and bool((found.isfinite() != due.isfinite())[differ].any()):
        kind = Kind.NONFINITE
    if label.endswith("_data") and bool(((found & _ANY_SIGN) == _NAN)[differ & (due == _NAN)].logical_not().any()):
        kind = Kind.NONFINITE
    count = f"{int(differ.sum())} of {differ.numel()} elements of {label} differ"
    return Finding(kind, f"{count}, first at {list(place)}: {_say(found[place])}, due {_say(due[place])}")


def _say(value: torch.Tensor) -> str:
    return f"0x{int(value):02X}" if value.dtype == torch.uint8 else f"{float(value):.9g}"


def _near(name: str, found: Any, due: Any, contract: Contract) -> list[Finding]:  # noqa: ANN401
    if found is None:
        return _missing(name)
    findings: list[Finding] = []
    share = contract.codes_off or 0.0
    for mine, theirs in zip(parts(name, found), parts(name, due), strict=True):
        a, b = mine.tensor, theirs.tensor
        if a.dtype != b.dtype or a.shape != b.shape:
            findings.append(
                Finding(Kind.RESULT, f"{mine.label} is {tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}")
            )
        elif not share:
            findings += [_difference(mine.label, a, b, differ)] if (differ := unequal(a, b)).any() else []
        elif mine.label.endswith("_data"):
            findings += _codes(mine.label, a, b, share, _NAN_CODES[due.format.name])
        else:
            off = _too_far(a, b, 2 * contract.bound[torch.float32])
            if off.any():
                findings.append(_difference(mine.label, a, b, off))
    return findings


def _too_far(found: torch.Tensor, due: torch.Tensor, share: float) -> torch.Tensor:
    """Factors and maxima behind a computation: E8M0 codes more than one apart, numbers more than both's error."""
    if found.dtype == torch.uint8:
        return (found.int() - due.int()).abs() > 1
    apart = (found.double() - due.double()).abs() > share * due.double().abs()
    return (apart | (found.isfinite() != due.isfinite())) & ~(found.isnan() & due.isnan()) & (found != due)


def _codes(label: str, found: torch.Tensor, due: torch.Tensor, share: float, nan: int) -> list[Finding]:
    """Codes behind a computation: NaN where NaN is due, and few of the others off, by one."""
    not_numbers = ((found & ~_SIGN & 0xFF) >= nan) != ((due & ~_SIGN & 0xFF) >= nan)
    if not_numbers.any():
        return [
            Finding(
                Kind.NONFINITE, f"{int(not_numbers.sum())} codes of {label} are NaN where none is due, or the reverse"
            )
        ]
    apart = (_in_order(found) - _in_order(due)).abs()
    off, most = int((apart > 0).sum()), int(apart.max()) if apart.numel() else 0
    if most > 1 or off > max(2, math.ceil(share * apart.numel())):
        return [
            Finding(
                Kind.VALUES,
                f"{off} of {apart.numel()} codes of {label} are off, by at most {most}; {share:.1%} may be, by one",
            )
        ]
    return []


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    wide = codes.int()
    return torch.where(wide >= _SIGN, _SIGN - wide, wide)


class _Allowed(NamedTuple):
    """How far a bounded result may be off.

    Attributes:
        contract: the op's.
        sources: 1 where what is due is exact; 2 where it was computed and rounded as well.
        fp8: both operands of a product are quantized.
    """

    contract: Contract
    sources: int
    fp8: bool

    def norm(self, dtype: torch.dtype) -> float:
        return self.sources * self.contract.bound[dtype]

    def elements(self, value: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        in_fp32 = _fp32_error(self.contract, dtype, fp8=self.fp8) * magnitude
        return self.sources * (_half_step(value.abs() + in_fp32, dtype) + in_fp32)


def _bounded(
    name: str, found: torch.Tensor | None, due: Due, allowed: _Allowed, everyday: bool
) -> tuple[list[Finding], float | None]:
    if found is None or found.shape != due.value.shape:
        shape = "missing" if found is None else f"of shape {tuple(found.shape)}"
        return [Finding(Kind.RESULT, f"{name} is {shape}, due is {tuple(due.value.shape)}")], None
    result = found.detach().cpu()
    rounded = due.value.to(result.dtype)
    largest = torch.finfo(result.dtype).max
    undecided = due.value.isfinite() & (due.value.abs() > largest * _NEARLY_INFINITE)
    wrong = _elsewhere(result, rounded) & ~undecided
    if wrong.any():
        return [_difference(name, result, rounded, wrong)], None
    finite = result.isfinite() & rounded.isfinite()
    value, magnitude = torch.where(finite, due.value, 0.0), torch.where(finite, due.magnitude, 0.0)
    distance = torch.where(finite, result.double() - value, 0.0).abs()
    over = distance > allowed.elements(value, magnitude.nan_to_num(nan=0.0, posinf=largest), result.dtype)
    findings = [_difference(name, result, rounded, over)] if over.any() else []
    if not everyday or result.numel() < _ENOUGH or not value.norm():
        return findings, None
    bound = allowed.norm(result.dtype)
    error = float(distance.norm() / value.norm()) / bound
    if error > 1:
        sentence = f"{name} is {error * bound:.2e} from the float64 result, {bound:.2e} is allowed"
        findings.append(Finding(Kind.VALUES, sentence))
    return findings, error


def _elsewhere(found: torch.Tensor, due: torch.Tensor) -> torch.Tensor:
    """Where one is NaN or an infinity and the other is not the same."""
    infinite = found.isinf() | due.isinf()
    return (found.isnan() != due.isnan()) | (infinite & (found != due) & ~due.isnan())


def _fp32_error(contract: Contract, dtype: torch.dtype, *, fp8: bool) -> float:
    own = contract.bound[torch.float32]
    return max(own, contract.bound[dtype] * _FP8_UNIT) if fp8 and dtype is not torch.float32 else own


def _half_step(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The most that one rounding to the dtype can move a value."""
    bits, smallest = _SIGNIFICAND[dtype]
    _, exponent = torch.frexp(value)
    return torch.exp2((exponent - 1).clamp(min=smallest).double() - bits - 1)
