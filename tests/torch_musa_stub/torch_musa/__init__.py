"""A stub, not torch_musa: the names that te_hal uses of it, with devices that hold nothing.

Imported by programs of tests/backends/test_musa.py. The variable TORCH_MUSA_STUB says how it behaves:
"devices=2,capability=3.1", or "fails=RuntimeError: text".
"""

import contextlib
import os
import types

import torch

_CHOICES = dict(pair.split("=", 1) for pair in os.environ.get("TORCH_MUSA_STUB", "").split(",") if pair)

if "fails" in _CHOICES:
    _kind, _, _text = _CHOICES["fails"].partition(": ")
    raise {"RuntimeError": RuntimeError, "ImportError": ImportError, "OSError": OSError}[_kind](_text)


class _Musa(types.ModuleType):
    """What torch_musa puts into torch under this name."""

    current = 0
    entered: list = []  # noqa: RUF012 - of the one instance

    def device_count(self):
        return int(_CHOICES.get("devices", "1"))

    def is_available(self):
        return self.device_count() > 0

    def current_device(self):
        return self.current

    def get_device_capability(self, device):
        assert device.type == "musa"
        return tuple(int(number) for number in _CHOICES.get("capability", "3.1").split("."))

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        self.entered.append(device.index)
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device):
        return types.SimpleNamespace(musa_stream=1000 + device.index)


if _CHOICES.get("leaves") != "nothing":
    torch.utils.rename_privateuse1_backend("musa")
    torch.musa = _Musa("torch.musa")
