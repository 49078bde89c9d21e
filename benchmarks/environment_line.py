"""The line every benchmark prints first: device, threads, versions, date."""

from __future__ import annotations

import datetime as dt
import platform
from pathlib import Path

import torch

import te_hal


def describe(device: str = "cpu") -> str:
    """Date, device and versions in one line."""
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    now = dt.datetime.now(tz=dt.timezone.utc)
    return (
        f"{now:%Y-%m-%d %H:%M} UTC; {name}; {torch.get_num_threads()} threads; Python {platform.python_version()}; "
        f"torch {torch.__version__}; te_hal {te_hal.__version__}"
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
