"""How much memory a comparison will take, estimated from its options alone, so that too much is refused in time.

Without this, a size that the machine does not have shows late: layers are made one by one, and the system kills the
process, or all of it starts to swap, minutes after the command.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from te_hal.cli.models import KINDS
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from te_hal.cli.config import CompareConfig

#: Weight and gradient (with its fp32 form or the master, where they are bf16), two moments: 16 bytes in every run.
_BYTES_PER_PARAMETER = 16
#: Modules, tensors and optimizer entries of a layer as Python objects; measured: 70 kB (2000 layers, width 16, fp32).
_OBJECTS_PER_LAYER = 64 * 1024
#: The largest run keeps activations in fp32.
_BYTES_PER_ACTIVATION = 4
_GIB = 2**30


def estimated_bytes(config: CompareConfig) -> int:
    """Bytes that a training step of the largest run holds: parameters, optimizer state, gradients, activations."""
    kind = KINDS[config.model]
    return (
        kind.parameter_count(config) * _BYTES_PER_PARAMETER
        + config.layers * _OBJECTS_PER_LAYER
        + config.tokens * kind.activations_per_token(config) * _BYTES_PER_ACTIVATION
    )


def check_size(config: CompareConfig, device: torch.device) -> None:
    """Refuse a comparison that memory cannot hold, before any of it is made.

    Raises:
        ArgumentError: the estimate is above what is free.
    """
    needed, free = estimated_bytes(config), free_bytes(device)
    if needed <= free:
        return
    count = KINDS[config.model].parameter_count(config)
    raise ArgumentError(
        "te-hal compare: --width, --layers, --batch, --sequence",
        got=f"a model of {count:,} parameters, whose training takes about {needed / _GIB:,.1f} GiB",
        accepted=f"what fits into the {free / _GIB:,.1f} GiB of memory that are free for {device.type} tensors",
        todo="choose smaller ones",
    )


def free_bytes(device: torch.device) -> int:
    """Memory that this process can still take for tensors of the device: the least of all limits that are known."""
    if device.type != "cpu":
        # Not all device modules of torch have it; without an answer the device's own error has to do.
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        return int(ask(device)[0]) if ask is not None else 2**63
    return min(_free_on_machine(), _free_in_group(), _free_address_space())


def _free_on_machine() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_group(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container's limit leaves; page cache counts as used here, so only the limit itself is compared."""
    limits = [*_lines(folder / "memory.max"), *_lines(folder / "memory" / "memory.limit_in_bytes")]
    return min((int(limit) for limit in limits if limit.isdigit()), default=2**63)


def _free_address_space() -> int:
    import resource  # noqa: PLC0415 - POSIX only

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 2**63
    pages = next((int(line.split()[0]) for line in _lines(Path("/proc/self/statm"))), 0)
    return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
