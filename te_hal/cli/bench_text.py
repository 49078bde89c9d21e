"""What `te-hal bench` prints: a record, and a comparison of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.cli.bench_outcome import FAILED, REFUSED
from te_hal.cli.bench_shapes import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_hal.cli.bench_record import Change, Comparison

#: Calls that a comparison lists of each kind; the rest is counted.
_LISTED = 20


def record_lines(record: dict[str, Any]) -> Iterator[str]:
    """A record as text."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    yield (
        f"{record['date']}; backend {record['backend']}; {record['device']}; {record['threads']} threads; {versions}; "
        f"timed by {'events of the device' if record['timed_by'] == 'events' else 'the clock of the process'}"
    )
    ceilings = record["ceilings"]
    yield (
        f"measured ceilings: copy {ceilings['copy_gb_per_s']:.4g} GB/s, "
        f"bf16 product {ceilings['gemm_tflop_per_s']:.4g} TFLOP/s"
    )
    rows = record["rows"]
    op, variant, shape = (max((len(row[name]) for row in rows), default=0) for name in ("op", "variant", "shape"))
    yield f"{'op':{op}}  {'of':{variant}}  {'shape':>{shape}}  {'us':>10}  {'rate':>15}  of ceiling"
    for row in rows:
        yield f"{row['op']:{op}}  {row['variant']:{variant}}  {row['shape']:>{shape}}  {_measured(row)}"
    yield from _fp8_lines(record.get("fp8"))


def _measured(row: dict[str, Any]) -> str:
    if REFUSED in row:
        return f"refused: {row[REFUSED]}"
    if FAILED in row:
        return f"FAILED: {row[FAILED]}"
    rate = f"{row['gb_per_s']:.4g} GB/s" if "gb_per_s" in row else f"{row['tflop_per_s']:.4g} TFLOP/s"
    note = "" if row["runs"] == "kernel" else f"  {row['runs']}"
    return f"{row['us']:>10.1f}  {rate:>15}  {row['of_ceiling']:>9.1%}{note}"


def _fp8_lines(found: dict[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield f"fprop, dgrad and wgrad of a square layer for {found['tokens']} tokens, casts included, beside bf16:"
    names = list(found["pays_from"])
    yield "  ".join([f"{'width':>7}", f"{'bf16 us':>11}", *(f"{name:>14}" for name in names)])
    for row in found["rows"]:
        plain = row["bf16_us"]
        shown = f"{_why(row, PLAIN):>11}" if plain is None else f"{plain:>11.1f}"
        yield "  ".join([f"{row['width']:>7}", shown, *(_cell(row, name) for name in names)])
    if all(row["bf16_us"] is None for row in found["rows"]):
        yield "nothing to hold FP8 against: bf16 runs at none of these widths"
        return
    for name, width in found["pays_from"].items():
        yield f"{name}: " + (f"pays from width {width}" if width else "pays at none of these widths on this device")


def _cell(row: dict[str, Any], name: str) -> str:
    """How much faster a way of scaling is than bf16; its time where that does not run."""
    scaled, plain = row["scaled_us"].get(name), row["bf16_us"]
    if scaled is None:
        return f"{_why(row, name):>14}"
    return f"{scaled:>11.1f} us" if plain is None else f"{plain / scaled:>12.2f} x"


def _why(row: dict[str, Any], name: str) -> str:
    return "FAILED" if name in row[FAILED] else REFUSED


def comparison_lines(found: Comparison, threshold: float) -> Iterator[str]:
    """A comparison as text."""
    for sentence in found.circumstances:
        yield f"not the same: {sentence}"
    yield (
        f"by more than {threshold:.0%}: {len(found.slower)} slower, {len(found.faster)} faster; "
        f"{found.unchanged} unchanged, {len(found.only_before)} only before, {len(found.only_now)} only now"
    )
    yield from _change_lines("SLOWER", found.slower)
    yield from _change_lines("faster", found.faster)


def _change_lines(word: str, changes: tuple[Change, ...]) -> Iterator[str]:
    for change in changes[:_LISTED]:
        before, now = ("did not run" if us is None else f"{us:.1f} us" for us in (change.before_us, change.now_us))
        ratio = "" if change.ratio is None else f", {change.ratio:.2f} x"
        yield f"  {word}  {change.id}: {before} before, {now} now{ratio}"
    if len(changes) > _LISTED:
        yield f"  {word}  {len(changes) - _LISTED} more"
