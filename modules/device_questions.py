"""Questions about a GPU and its library, under Transformer Engine's names."""

from __future__ import annotations

from importlib import import_module

import torch

from te_hal.schema.errors import UnsupportedError

#: What torch's module of a device calls it.
_QUESTION = "get_device_capability"


def get_cudnn_version() -> tuple[int, int, int]:
    """Major, minor and patch version of the cuDNN that torch brings.

    Raises:
        UnsupportedError: this torch has none.
    """
    found = import_module("torch.backends.cudnn").version()
    if found is None:
        raise UnsupportedError(
            "get_cudnn_version",
            got="a torch without cuDNN",
            accepted="one that was built with it",
            todo="ask te_hal.list_backends() what is usable here",
        )
    major_digits = 10000 if found >= 90000 else 1000  # noqa: PLR2004 - how cuDNN counts since 9.0, and before
    major, rest = divmod(int(found), major_digits)
    return major, rest // 100, rest % 100


def get_device_compute_capability() -> tuple[int, int]:
    """Major and minor compute capability of torch's current GPU.

    Raises:
        UnsupportedError: torch sees none.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    asked = None if accelerator is None else getattr(torch.get_device_module(accelerator), _QUESTION, None)
    if asked is None:
        raise UnsupportedError(
            "get_device_compute_capability",
            got="no GPU in torch" if accelerator is None else f"a device of type {accelerator.type}",
            accepted=f"a GPU whose module in torch has {_QUESTION}",
            todo="ask te.is_fp8_available(return_reason=True) what the backend in force can do",
        )
    capability: tuple[int, int] = asked()
    return capability
