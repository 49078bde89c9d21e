"""The calls that are timed: every op family over the standard sizes, made when their turn comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_hal import ops
from te_hal.cli.bench_shapes import LAYOUTS, MODELS, OPERANDS, PLAIN, SCALED, Model, Size
from te_hal.schema.formats import ScalingMode, element_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_hal.dispatch import Backend

_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Maker:
    """Makes operands where the calls run.

    Attributes:
        backend: whose products read them.
        device: where they lie.
    """

    backend: Backend
    device: torch.device

    def normal(self, *shape: int) -> torch.Tensor:
        """Normal values; bf16."""
        return torch.randn(shape, dtype=_BF16, device=self.device)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Ones."""
        return torch.ones(shape, dtype=dtype, device=self.device)

    def cast_flags(self, dtype: torch.dtype, mode: ScalingMode, copies: set[str]) -> dict[str, Any]:
        """Arguments of a cast that makes these copies; a given scale where there is one per tensor."""
        scale = {"scale": self.ones(1), "amax": self.ones(1) * 0} if mode is ScalingMode.TENSOR else {}
        flags: dict[str, Any] = {name: name in copies for name in ("rowwise", "columnwise")}
        return {**scale, **flags, "dtype": dtype, "mode": mode, "columnwise_order": self.backend.columnwise_order}

    def read_by(self, layout: str, operand: str, name: str) -> set[str]:
        """The copy that a product reads of its operand ``a`` or ``b``, in one of the :data:`SCALED` ways."""
        dtype, mode = SCALED[name].formats[operand]
        copies = self.backend.gemm_copies(layout, element_format(dtype), mode)
        return {copies.a if operand == OPERANDS[layout][0] else copies.b}


@dataclass(frozen=True)
class BenchCase:
    """One call.

    Attributes:
        op: its name.
        variant: what tells it from other calls of the op: dtypes, copies, layout.
        shape: sizes, in words.
        make: gives the arguments by name.
        operations: floating-point operations of a product; 0: the call is measured by the bytes it moves.
    """

    op: str
    variant: str
    shape: str
    make: Callable[[Maker], dict[str, Any]]
    operations: int = 0

    @property
    def id(self) -> str:
        """What a record calls it."""
        return f"{self.op}:{self.variant}:{self.shape}"


def bench_cases(size: Size) -> list[BenchCase]:
    """Every call of a size, each once though several models have it."""
    found: dict[str, BenchCase] = {}
    for name in size.models:
        model = MODELS[name]
        for case in (*_row_cases(size.tokens, model), *_gemm_cases(size, model)):
            found.setdefault(case.id, case)
    return list(found.values())


def _row_cases(tokens: int, model: Model) -> Iterator[BenchCase]:
    """Everything that is measured by bytes."""
    rows = (tokens, model.hidden)
    shape, inner = f"{tokens}x{model.hidden}", f"{tokens}x{2 * model.ffn}"
    yield BenchCase("amax", PLAIN, shape, lambda m: {"input": m.normal(*rows)})
    for name, mode in (
        ("per tensor", ScalingMode.TENSOR),
        ("1x128", ScalingMode.BLOCK_1X128),
        ("mxfp8", ScalingMode.MXFP8),
    ):
        for copies in ({"rowwise"}, {"rowwise", "columnwise"}):
            variant = f"{name}, {'both copies' if len(copies) > 1 else 'rowwise'}"
            yield BenchCase("quantize", variant, shape, _cast(rows, mode, copies))
        yield BenchCase("dequantize", name, shape, _decode(rows, mode))
    yield BenchCase("quantize_current", "rowwise", shape, lambda m: {"input": m.normal(*rows), "dtype": _E4M3})
    yield BenchCase("bias_grad", PLAIN, shape, lambda m: {"grad_output": m.normal(*rows)})
    yield from _norm_cases(rows, shape)
    gated = {"activation": "swiglu"}
    wide = (tokens, 2 * model.ffn)
    yield BenchCase("activation_fwd", "swiglu", inner, lambda m: {"input": m.normal(*wide), **gated})
    yield BenchCase(
        "activation_bwd",
        "swiglu",
        inner,
        lambda m: {"grad_output": m.normal(tokens, model.ffn), "input": m.normal(*wide), **gated},
    )
    scores = (1, model.heads, min(tokens, 2048), min(tokens, 2048))
    words = "x".join(map(str, scores))
    yield BenchCase("softmax_fwd", "causal", words, lambda m: {"input": m.normal(*scores), "causal": "top_left"})
    yield BenchCase(
        "softmax_bwd",
        PLAIN,
        words,
        lambda m: {"grad_output": m.normal(*scores), "output": m.normal(*scores).softmax(-1)},
    )


def _norm_cases(rows: tuple[int, int], shape: str) -> Iterator[BenchCase]:
    tokens, hidden = rows

    def given(m: Maker, *names: str) -> dict[str, Any]:
        made = {"weight": m.ones(hidden, dtype=_BF16), "bias": m.ones(hidden, dtype=_BF16), "rstd": m.ones(tokens)}
        made |= {"mean": m.ones(tokens) * 0, "input": m.normal(*rows), "grad_output": m.normal(*rows)}
        return {name: made[name] for name in names}

    yield BenchCase("rmsnorm_fwd", PLAIN, shape, lambda m: given(m, "input", "weight"))
    yield BenchCase("layernorm_fwd", PLAIN, shape, lambda m: given(m, "input", "weight", "bias"))
    backward = ("grad_output", "input", "rstd", "weight")
    yield BenchCase("rmsnorm_bwd", PLAIN, shape, lambda m: given(m, *backward))
    yield BenchCase("layernorm_bwd", PLAIN, shape, lambda m: given(m, *backward, "mean"))
    yield BenchCase(
        "rmsnorm_quantize",
        "per tensor, rowwise",
        shape,
        lambda m: {**given(m, "input", "weight"), **m.cast_flags(_E4M3, ScalingMode.TENSOR, {"rowwise"})},
    )


def _cast(rows: tuple[int, int], mode: ScalingMode, copies: set[str]) -> Callable[[Maker], dict[str, Any]]:
    return lambda m: {"input": m.normal(*rows), **m.cast_flags(_E4M3, mode, copies)}


def _decode(rows: tuple[int, int], mode: ScalingMode) -> Callable[[Maker], dict[str, Any]]:
    return lambda m: {
        "input": ops.quantize(m.normal(*rows), **m.cast_flags(_E4M3, mode, {"rowwise"})),
        "out_dtype": _BF16,
    }


def _gemm_cases(size: Size, model: Model) -> Iterator[BenchCase]:
    for name, (out, into) in model.linears.items():
        if size.quick and name not in ("proj", "fc1"):
            continue
        for layout in LAYOUTS[: 1 if size.quick and name == "fc1" else 3]:
            for way in (PLAIN, *SCALED):
                yield BenchCase(
                    "gemm",
                    f"{way}, {layout}",
                    f"{size.tokens}x{out}x{into}",
                    _product(layout, way, (size.tokens, out, into)),
                    operations=2 * size.tokens * out * into,
                )


def _product(layout: str, way: str, sizes: tuple[int, int, int]) -> Callable[[Maker], dict[str, Any]]:
    tokens, out, into = sizes
    shapes = {"input": (tokens, into), "weight": (out, into), "grad_output": (tokens, out)}

    def make(m: Maker) -> dict[str, Any]:
        made: list[object] = []
        for operand in OPERANDS[layout]:
            plain = m.normal(*shapes[operand])
            if way == PLAIN:
                made.append(plain)
            else:
                flags = m.cast_flags(*SCALED[way].formats[operand], m.read_by(layout, operand, way))
                made.append(ops.quantize(plain, **flags))
        return {"a": made[0], "b": made[1], "layout": layout, "out_dtype": _BF16}

    return make
