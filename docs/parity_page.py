"""The page te_parity.md: every name and argument of Transformer Engine's PyTorch API, and what becomes of it here.

Its surface is data, te_surface.json. What is refused is what the code declares where it refuses, what is supported is
what signatures have; te_parity_notes.json adds what neither shows. Something that none of these knows is an error.
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.refusals import REFUSED

FOLDER = Path(__file__).parent
SURFACE = FOLDER / "te_surface.json"
NOTES = FOLDER / "te_parity_notes.json"
#: Public names that Transformer Engine does not have.
OWN_NAMES = {
    *("MTFP8Quantizer", "MTFP8Tensor", "QuantizedStorage", "RNGStatesTracker", "check_extra_states", "memory_report"),
    *("is_mtfp8_block_scaling_available", "quantizer_factory", "recipe.MTFP8BlockScaling"),
}
#: Headings, and what belongs below each; what fits none goes below the last.
_SECTIONS: dict[str, tuple[str, ...]] = {
    "Modules": ("Linear", "LayerNorm", "RMSNorm", "GroupedLinear", "TransformerLayer", "Fp8", "FusedMLA"),
    "Attention and generation": ("DotProductAttention", "MultiheadAttention", "InferenceParams", "Rotary", "apply_"),
    "Mixture of experts": ("moe_", "router."),
    "Fusible operations": ("ops.",),
    "Recipes": ("recipe.", "Quantizer", "DelayedScalingRequest", "quantizer_factory"),
    "Quantizers": ("Float8", "MXFP8", "NVFP4", "Hybrid", "Identity"),
    "Optimizers": ("optimizers.",),
    "Functions and contexts": ("",),
}
_NAMES = {
    "torch": torch,
    "RoutingMapFormat": te.router.RoutingMapFormat,
    "Format": recipe.Format,
    "MMParams": recipe.MMParams,
    "DType": te.DType,
}


class Row(NamedTuple):
    """What becomes of an argument: ``kind`` is "supported", "different" or "refused"."""

    argument: str
    kind: str
    words: str = ""


def surface() -> dict[str, Any]:
    """Transformer Engine's names, their arguments in order, and defaults as Python writes them; None: it has none."""
    found: dict[str, Any] = json.loads(SURFACE.read_text(encoding="utf-8"))
    return found


@cache
def notes() -> dict[str, Any]:
    """What neither declarations nor signatures say, by table, callable and argument."""
    found: dict[str, Any] = json.loads(NOTES.read_text(encoding="utf-8"))
    return found


def here(name: str) -> object:
    """What te_hal has under a name of Transformer Engine; None where it refuses the name.

    Raises:
        AttributeError: it neither has nor refuses the name.
    """
    if name in te._REFUSED_NAMES:  # noqa: SLF001
        return None
    found: object = recipe if name.startswith("recipe.") else te
    for part in name.removeprefix("recipe.").split("."):
        found = getattr(found, part)
    return found


def rows(name: str, method: str, arguments: dict[str, str | None]) -> list[Row]:
    """What becomes of every argument of a callable or its method, in Transformer Engine's order.

    Raises:
        LookupError: an argument that te_hal neither has nor says why it has not.
    """
    function = getattr(here(name), method) if method else here(name)
    ours = inspect.signature(function).parameters  # type: ignore[arg-type] # a callable
    whole = f"{name}.{method}" if method else name
    refused = REFUSED.get(whole, {})
    shared = [argument for argument in ours if argument in arguments]
    moved = shared != [argument for argument in arguments if argument in ours]
    return [_row(whole, argument, default, ours, refused.get(argument)) for argument, default in arguments.items()] + (
        [Row("order of arguments", "different", "not Transformer Engine's: pass them by name")] if moved else []
    )


def _row(whole: str, given: str, default: str | None, ours: Any, refusal: Any) -> Row:  # noqa: ANN401
    argument = given.lstrip("*")
    if refusal is not None:
        return Row(argument, "refused", f"anything but `{refusal.accepted!r}`: {refusal.reason}")
    absent, note = _noted("absent", whole, argument), _noted("different", whole, argument)
    if absent:
        return Row(argument, "refused", absent)
    renamed = notes()["renamed"].get(whole, {}).get(argument)
    if renamed:
        return Row(argument, "different", f"called `{renamed}`")
    takes_any = {p.kind: p for p in ours.values()}
    if argument not in ours:
        packs = inspect.Parameter.VAR_POSITIONAL if given.startswith("*") else inspect.Parameter.VAR_KEYWORD
        if packs not in takes_any:
            message = f"{whole}: {argument} is neither in the signature nor declared as refused"
            raise LookupError(message)
        return Row(argument, "different" if note else "supported", note)
    words = [note] if note else []
    changed = "" if given.startswith("*") or note else _changed(default, ours[argument].default)
    return Row(argument, "different" if note or changed else "supported", "; ".join([*words, *filter(None, [changed])]))


def _noted(table: str, whole: str, argument: str) -> str:
    told = notes()[table]
    return str(told.get(whole, {}).get(argument, "") or told["*"].get(argument, ""))


def _changed(theirs: str | None, ours: object) -> str:
    """In words, how a default differs."""
    needed = ours is inspect.Parameter.empty
    if theirs is None:
        return "" if needed else f"may be left out: `{_told(ours)}`"
    if needed:
        return f"needed; there `{theirs}` by default"
    same = eval(theirs, dict(_NAMES)) == ours  # noqa: S307 - the data of this repository
    return "" if same else f"`{_told(ours)}` by default, there `{theirs}`"


def _told(value: object) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, (recipe.Format, te.DType)) else repr(value)


def parity_page() -> str:
    """All of it, by section."""
    known = surface()
    lines = [
        "# Parity with transformer_engine.pytorch",
        (
            f"{known['source']} *Supported* arguments mean here what they mean there; *different* and *refused* ones "
            "are listed with how or why. A refused argument at another value than the one that is told raises an error "
            "that names it. Numbers and behaviour that differ: [differences.md](differences.md); imports: "
            "[imports.md](imports.md)."
        ),
    ]
    left = dict(known["callables"])
    for heading, starts in _SECTIONS.items():
        mine = [name for name in left if name.startswith(starts)]
        lines += [f"## {heading}", *(_callable(name, left.pop(name)) for name in mine)]
    lines += ["## Other names", _other_names(known["values"]), "## te_hal's own", _own(known)]
    return "\n\n".join(lines) + "\n"


def _callable(name: str, described: dict[str, Any]) -> str:
    whole = te._REFUSED_NAMES.get(name, "") or notes()["refused"].get(name, "")  # noqa: SLF001
    if whole:
        return f"### `{name}`\n\nRefused: {whole}."
    parts = [f"### `{name}`"]
    if described["arguments"] or not described["methods"]:
        parts.append(_told_rows("", rows(name, "", described["arguments"])))
    bare = [method for method, arguments in described["methods"].items() if _is_bare(name, method, arguments)]
    if bare:
        parts.append(f"Supported methods without arguments: {', '.join(f'`{method}`' for method in bare)}.")
    for method, arguments in described["methods"].items():
        absent = _noted("absent", name, method)
        if method in bare:
            continue
        if absent:
            parts.append(f"`{method}` is refused: {absent}.")
        else:
            parts.append(_told_rows(f"`{method}`: ", rows(name, method, arguments)))
    return "\n\n".join(parts)


def _is_bare(name: str, method: str, arguments: dict[str, str | None]) -> bool:
    return not arguments and not _noted("absent", name, method) and not rows(name, method, arguments)


def _told_rows(start: str, found: list[Row]) -> str:
    supported = [f"`{row.argument}`" for row in found if row.kind == "supported"]
    head = f"{start}supported: {', '.join(supported)}." if supported else f"{start}supported, without arguments."
    others = [row for row in found if row.kind != "supported"]
    if not others:
        return head
    if not supported:
        head = start.rstrip(": ") + ":" if start else "Its arguments:"
    table = [f"| `{row.argument}` | {row.kind} | {row.words} |" for row in _merged(others)]
    return "\n".join([head, "", "| argument | | how, or why |", "|---|---|---|", *table])


def _merged(found: list[Row]) -> list[Row]:
    """Rows that say the same as one."""
    merged: dict[tuple[str, str], list[str]] = {}
    for row in found:
        merged.setdefault((row.kind, row.words), []).append(row.argument)
    return [Row("`, `".join(names), kind, words) for (kind, words), names in merged.items()]


def _other_names(values: dict[str, str]) -> str:
    told = []
    for name in sorted(values):
        refused = name in te._REFUSED_NAMES  # noqa: SLF001
        here(name)
        told.append(f"| `{name}` | {'refused: ' + te._REFUSED_NAMES[name] if refused else 'supported'} |")  # noqa: SLF001
    return "\n".join(["| name | |", "|---|---|", *told])


def _own(known: dict[str, Any]) -> str:
    """Public names that Transformer Engine does not have.

    Raises:
        LookupError: a public name that is neither in the data nor listed as te_hal's own.
    """
    public = {*te.__all__, *(f"recipe.{name}" for name in recipe.__all__)} - {"ops", "optimizers", "router"}
    unknown = public - OWN_NAMES - set(known["callables"]) - set(known["values"])
    if unknown:
        message = f"in neither te_surface.json nor OWN_NAMES: {', '.join(sorted(unknown))}"
        raise LookupError(message)
    return ", ".join(f"`{name}`" for name in sorted(OWN_NAMES)) + "."
