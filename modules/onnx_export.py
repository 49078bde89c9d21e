"""onnx_export: refused, with what to export instead."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from te_hal.schema.errors import UnsupportedError
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare

if TYPE_CHECKING:
    from collections.abc import Iterator

_REFUSED = declare(
    "onnx_export", {"enabled": False}, {"enabled": "an exported graph would not compute what te_hal's kernels do"}
)


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Refused when enabled; ``enabled=False`` changes nothing.

    te_hal's kernels are no operators of ONNX, and its casts have none that rounds as they do, so an exported graph
    would compute other numbers.

    Args:
        enabled: modules are about to be exported.

    Raises:
        ArgumentError: no bool.
        UnsupportedError: True.
    """
    check_flags("onnx_export", {"enabled": enabled})
    if enabled:
        raise UnsupportedError(
            "onnx_export: enabled",
            got="True",
            accepted=f"False: {_REFUSED['enabled'].reason}",
            todo="load the weights into a model of torch.nn's layers (state dicts without the keys that end in "
            "_extra_state have its names) and export that",
        )
    yield
