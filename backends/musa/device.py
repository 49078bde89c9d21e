"""Moore Threads GPUs as torch_musa shows them: whether there are any, and the stream and device of a call.

torch_musa is imported when its devices are asked for and not before, since its import changes torch. Nothing here
changes anything of torch.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from te_hal.ffi.devices import Devices
from te_hal.schema.support import SUPPORTED, Code, Support

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from te_hal.ffi.native import Native

_NAME = "torch_musa"


def usable(native: Native) -> Support:
    """Whether torch_musa sees a GPU, and the kernel library opens and has code for it. May start the device."""
    answer = _import()
    if not answer:
        return answer
    if not musa().is_available() or musa().device_count() == 0:
        sentence = "torch_musa sees no GPU; check the driver with mthreads-gmi, and MUSA_VISIBLE_DEVICES"
        return Support.no(Code.ENVIRONMENT, sentence)
    return native.runs_on(musa().current_device())


def _import() -> Support:
    """Import torch_musa, which puts ``musa`` into torch; the reason if that cannot be."""
    if importlib.util.find_spec(_NAME) is None:
        return Support.no(Code.ENVIRONMENT, "torch_musa is not installed, without which torch has no MUSA devices")
    try:
        importlib.import_module(_NAME)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).replace("\n", " ")
        return Support.no(Code.ENVIRONMENT, f"torch_musa cannot be imported: {reason}")
    if not hasattr(torch, "musa"):
        return Support.no(Code.ENVIRONMENT, "torch_musa left no torch.musa when imported; install one that fits torch")
    return SUPPORTED


def musa() -> Any:  # noqa: ANN401 - a module that torch's stubs do not know
    """``torch.musa``."""
    return torch.musa  # type: ignore[attr-defined]


def architecture(device: torch.device) -> int:
    """10 * major + minor: 22 for mp_22, 31 for mp_31."""
    major, minor = musa().get_device_capability(device)
    return 10 * int(major) + int(minor)


def _stream(device: torch.device) -> int:
    """torch_musa's current stream on a device; its other streams do not wait for the default one."""
    return int(musa().current_stream(device).musa_stream)


def _current() -> int:
    return int(musa().current_device())


def _enter(device: torch.device) -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = musa().device(device)
    return context


DEVICES = Devices("musa", stream=_stream, current=_current, enter=_enter)
