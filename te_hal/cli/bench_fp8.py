"""From which size FP8 pays: the products of a square linear layer's training step, casts included, beside bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal import ops
from te_hal.cli.bench_outcome import FAILED, REFUSED, outcome_of
from te_hal.cli.bench_shapes import LAYOUTS, OPERANDS, PLAIN, SCALED
from te_hal.cli.failure import STEP_FAILURES

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.cli.bench_cases import Maker
    from te_hal.cli.bench_clock import Clock
    from te_hal.cli.bench_shapes import Size


def fp8_rows(maker: Maker, clock: Clock, size: Size) -> dict[str, Any]:
    """Microseconds of fprop, dgrad and wgrad by width, and the width from which each way of scaling is faster.

    Every step casts input, weight and grad_output once, with the copies that the backend's products read; norms,
    activations and fused casts are left out, so a layer may pay a little earlier.
    """
    rows = [_row(maker, clock, size.tokens, width) for width in size.widths]
    return {"tokens": size.tokens, "rows": rows, "pays_from": {name: pays_from(rows, name) for name in SCALED}}


def _row(maker: Maker, clock: Clock, tokens: int, width: int) -> dict[str, Any]:
    """Least times: other work on the machine only ever adds to them. None in bf16 where that does not run."""
    row: dict[str, Any] = {"width": width, "bf16_us": None, "scaled_us": {}, REFUSED: {}, FAILED: {}}
    for way in (PLAIN, *SCALED):
        try:
            least = clock.measure(_step(maker, tokens, width, way)).least_us
        except STEP_FAILURES as error:
            word, why = outcome_of(error)
            row[word][way] = why
            continue
        if way == PLAIN:
            row["bf16_us"] = least
        else:
            row["scaled_us"][way] = least
    return row


def pays_from(rows: list[dict[str, Any]], name: str) -> int | None:
    """The smallest width from which a way of scaling is faster than bf16 at every measured one; None: at none."""
    found = None
    for row in reversed(rows):
        scaled, plain = row["scaled_us"].get(name), row["bf16_us"]
        if scaled is None or plain is None or scaled >= plain:
            break
        found = row["width"]
    return found


def _step(maker: Maker, tokens: int, width: int, way: str) -> Callable[[], object]:
    plain = {"input": maker.normal(tokens, width), "weight": maker.normal(width, width)}
    plain["grad_output"] = maker.normal(tokens, width)
    flags = {} if way == PLAIN else _flags(maker, way)

    def step() -> None:
        given: dict[str, Any] = {
            name: value if way == PLAIN else ops.quantize(value, **flags[name]) for name, value in plain.items()
        }
        for layout in LAYOUTS:
            a, b = (given[operand] for operand in OPERANDS[layout])
            ops.gemm(a, b, layout=layout, out_dtype=torch.bfloat16)

    return step


def _flags(maker: Maker, way: str) -> dict[str, dict[str, Any]]:
    """Arguments of the cast of each operand."""
    copies: dict[str, set[str]] = {}
    for layout in LAYOUTS:
        for operand in OPERANDS[layout]:
            copies.setdefault(operand, set()).update(maker.read_by(layout, operand, way))
    return {name: maker.cast_flags(*SCALED[way].formats[name], kept) for name, kept in copies.items()}
