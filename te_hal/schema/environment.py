"""The environment, read once: every TE_HAL_* variable in one table, unknown ones reported.

What can change at run time is an API; the variable is its start value.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "TE_HAL_"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table.

    ``kind`` is "flag", "name", "file", "folders" (colon separated) or "backends": names separated by commas, for every
    op; with an op in front (``gemm=a,b``) for that op alone; several of these are separated by semicolons.

    Attributes:
        choices: of a name that is one of a few; none: any.
    """

    name: str
    kind: str
    meaning: str
    choices: tuple[str, ...] = ()


#: What a recipe's ``backward_override`` may be besides None.
OVERRIDES = ("high_precision", "dequantized")


TABLE = (
    Variable("TE_HAL_BACKEND", "name", "backend in force at start, as by te_hal.set_backend"),
    Variable("TE_HAL_POLICY", "file", "policy in force at start, as by te_hal.set_policy(te_hal.read_policy(file))"),
    Variable("TE_HAL_ORDER", "backends", "the first one that works runs the op, as te_hal.Policy(order=...)"),
    Variable("TE_HAL_ALLOW", "backends", "they alone may run the op, as te_hal.Policy(allow=...)"),
    Variable(
        "TE_HAL_DENY",
        "backends",
        "they may not run the op, as te_hal.Policy(deny=...); one that is denied every op is not even loaded",
    ),
    Variable("TE_HAL_FALLBACK", "backends", "they may take over the op, as te_hal.Policy(fallback=...)"),
    Variable(
        "TE_HAL_FP8_CURRENT_SCALING_POWER_2_SCALES",
        "flag",
        "default of recipe.Float8CurrentScaling.use_power_2_scales",
    ),
    Variable(
        "TE_HAL_FP8_BLOCK_SCALING_FP32_SCALES",
        "flag",
        "default of recipe.Float8BlockScaling.use_f32_scales",
    ),
    Variable("TE_HAL_NVFP4_DISABLE_RHT", "flag", "default of recipe.NVFP4BlockScaling.disable_rht"),
    Variable(
        "TE_HAL_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        "flag",
        "default of recipe.NVFP4BlockScaling.disable_stochastic_rounding",
    ),
    Variable(
        "TE_HAL_NVFP4_DISABLE_2D_QUANTIZATION",
        "flag",
        "default of recipe.NVFP4BlockScaling.disable_2d_quantization",
    ),
    Variable(
        "TE_HAL_BACKWARD_OVERRIDE",
        "name",
        "default of backward_override in every recipe that has the field; DelayedScaling takes None alone",
        OVERRIDES,
    ),
    Variable("TE_HAL_LIBRARY_PATH", "folders", "where kernel libraries (libte_hal_<backend>.so) are looked for first"),
    Variable(
        "TE_HAL_EMULATOR", "name", 'how the emulated device behaves, "threads=2,wave=128,seed=7"; the library reads it'
    ),
)


@dataclass(frozen=True, slots=True)
class Environment:
    """The parsed values; of backends by op, ``"*"`` is every op. ``unknown`` lists TE_HAL_* names that nobody reads."""

    backend: str | None = None
    policy: str | None = None
    order: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    allow: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    deny: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fallback: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fp8_current_scaling_power_2_scales: bool = False
    fp8_block_scaling_fp32_scales: bool = False
    nvfp4_disable_rht: bool = False
    nvfp4_disable_stochastic_rounding: bool = False
    nvfp4_disable_2d_quantization: bool = False
    backward_override: str | None = None
    library_path: tuple[str, ...] = ()
    emulator: str | None = None
    unknown: tuple[str, ...] = ()


def parse(variables: Mapping[str, str]) -> Environment:
    """Read a mapping of variables.

    Raises:
        ArgumentError: a flag is neither true nor false, a name none of its choices; backends are not as they are to be
            written.
    """
    known = {variable.name for variable in TABLE}
    values: dict[str, object] = {}
    for variable in TABLE:
        text = variables.get(variable.name, "").strip()
        name = variable.name[len(PREFIX) :].lower()
        if variable.kind == "flag":
            values[name] = _flag(variable.name, text)
        elif variable.kind == "folders":
            values[name] = _names(text, ":")
        elif variable.kind == "backends":
            values[name] = _backends(variable.name, text)
        else:
            values[name] = _name(variable, text)
    unknown = tuple(sorted(name for name in variables if name.startswith(PREFIX) and name not in known))
    return Environment(**values, unknown=unknown)  # type: ignore[arg-type]


def _name(variable: Variable, text: str) -> str | None:
    if text and variable.choices and text not in variable.choices:
        accepted = ", ".join(map(repr, variable.choices))
        raise ArgumentError(variable.name, got=repr(text), accepted=accepted, todo="correct it, or unset it")
    return text or None


def _names(text: str, separator: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(separator) if name.strip())


def _backends(name: str, text: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split(";"):
        if not part.strip(" ,"):
            continue
        op, _, names = part.partition("=") if "=" in part else ("*", "=", part)
        op = op.strip()
        if not op or "=" in names or op in found:
            raise ArgumentError(
                name,
                got=repr(text),
                accepted="name,name for every op, op=name,name for one, each once, separated by ;",
                todo="correct the value, or unset it",
            )
        found[op] = _names(names, ",")
    return found


def _flag(name: str, text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ArgumentError(
        name,
        got=repr(text),
        accepted=f"{', '.join(sorted(_TRUE))} or {', '.join(sorted(_FALSE - {''}))}",
        todo="set it to 0 or 1, or unset it",
    )


def _read() -> Environment:
    environment = parse(os.environ)
    if environment.unknown:
        known = ", ".join(variable.name for variable in TABLE)
        warnings.warn(
            f"environment: unknown {', '.join(environment.unknown)} (ignored); known: {known}",
            stacklevel=2,
        )
    return environment


#: The process's environment as it was at import.
ENVIRONMENT = _read()
