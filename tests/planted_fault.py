"""A backend that is cpu_reference with one fault planted in one op."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import register_backend, registry
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable


def plant(op: str, harm: Callable[[Any], None], *, after: int = 0, when: Callable[..., bool] = lambda **_: True) -> str:
    """Register backend "faulty".

    Args:
        op: whose result is harmed.
        harm: changes the result in place.
        after: so many right calls come first.
        when: which calls, by their flags.
    """
    right = registry.tables().backends["cpu_reference"]
    kernel, calls = right.kernels[op], 0
    defaults = {flag.name: flag.default for flag in SCHEMAS[op].flags}

    @functools.wraps(kernel)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = kernel(*args, **kwargs)
        if when(**{**defaults, **kwargs}):
            calls += 1
            if calls > after:
                harm(result)
        return result

    kernels = {**right.kernels, op: faulty}
    register_backend(dataclasses.replace(right, name="faulty", kernels=kernels, default_for=frozenset()))
    return "faulty"


def one_element(result: Any) -> None:
    """The first element of a result is off by a tenth of the largest, or by one code."""
    if isinstance(result, QuantizedStorage):
        result.rowwise_data.view(-1)[0] ^= 1
        return
    tensor = result[0] if isinstance(result, tuple) else result
    tensor.view(-1)[0] += 0.1 * tensor.abs().max() + 1e-3


def one_percent(result: Any) -> None:
    """Everything is 1% too large."""
    tensor = result[0] if isinstance(result, tuple) else result
    tensor *= 1.01


def nan_dropped(result: Any) -> None:
    """NaN becomes 0."""
    result.nan_to_num_(nan=0.0)
