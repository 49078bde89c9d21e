"""How much memory a training step needs, measured on a copy of the run that is thrown away.

Saved bytes are those that autograd's saved-tensor hooks see: distinct storages, parameters left out. Forward at two
batch sizes tells activations, which grow with the batch, from the rest.

The peak on a CPU is the largest sum of the bytes of all tensors alive, looked at after each torch operation of a
second training step. Memory that an operation takes and gives back inside itself is not seen, and the text is left
out. Elsewhere it is the device's own count of allocated memory.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_hal.cli.memory_parts import saved_by_part
from te_hal.cli.results import Memory
from te_hal.cli.training import Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.cli.config import CompareConfig
    from te_hal.cli.precision import Precision
    from te_hal.cli.text import Text


def measure_memory(precision: Precision, config: CompareConfig, text: Text, device: torch.device) -> Memory:
    """Bytes of a training step. Trains a run of its own; torch's global CPU seed is as before.

    Args:
        precision: with a recipe object that no other run uses.
        config: as for the run.
        text: as for the run.
        device: as for the run.
    """
    with torch.random.fork_rng(devices=[]):
        if device.type == "cpu":
            run, peak = _peak_of_live_tensors(lambda: Run(precision, config, text, device), text)
            method = "live tensors, looked at after each torch operation"
        else:
            run, peak = _peak_of_allocator(lambda: Run(precision, config, text, device), device)
            method = f"torch.{device.type}.max_memory_allocated"
        activations, other = _saved_bytes(run, config.batch, config.rows)
    return Memory(
        parameter_bytes=sum(p.nbytes for p in run.model.parameters()),
        optimizer_bytes=run.optimizer.nbytes(),
        saved_activation_bytes=sum(activations.values()),
        saved_other_bytes=other,
        saved_by_part=activations,
        peak_bytes=peak,
        method=method,
    )


def _peak_of_live_tensors(build: Callable[[], Run], text: Text) -> tuple[Run, int]:
    with LiveBytes(ignored=(text.train, text.held_out)) as live:
        run = build()
        run.step()
        live.peak = live.now
        run.step()
    return run, live.peak


def _peak_of_allocator(build: Callable[[], Run], device: torch.device) -> tuple[Run, int]:
    allocator = torch.get_device_module(device)
    before = allocator.memory_allocated(device)
    run = build()
    run.step()
    allocator.reset_peak_memory_stats(device)
    run.step()
    return run, allocator.max_memory_allocated(device) - before


def _saved_bytes(run: Run, batch: int, rows: int) -> tuple[dict[str, int], int]:
    """Bytes kept for backward at `batch`: those that grow with it, by part of the model, and the sum of the others.

    `rows` is the smallest batch that FP8 gemms take whatever the model.
    """
    small = rows if batch > rows else 2 * rows
    at_batch, at_small = (saved_by_part(run, size) for size in (batch, small))
    growing = {part: round((at_batch[part] - at_small[part]) / (batch - small) * batch) for part in at_batch}
    return growing, sum(at_batch.values()) - sum(growing.values())


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # its __init_subclass__
    """Sums the bytes of tensors made while it is active and still alive.

    Args:
        ignored: tensors made before whose views are not to count.

    Attributes:
        now: bytes alive.
        peak: the most that `now` has been since it was last set.
    """

    def __init__(self, ignored: tuple[torch.Tensor, ...] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}  # noqa: SLF001 - a storage's identity
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run the operation and add what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # A quantized tensor's own storage is as large as its nominal dtype says, but has no memory behind it, as on
            # the meta device.
            if isinstance(leaf, torch.Tensor) and not (hasattr(leaf, "quantized_storage") or leaf.is_meta):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        identity = storage._cdata  # noqa: SLF001 - as above
        if identity in self._ignored:
            return
        if identity not in self._known:
            self._known[identity] = 0
            weakref.finalize(storage, self._remove, identity).atexit = False
        self.now += storage.nbytes() - self._known[identity]  # a tensor that was resized is seen again
        self._known[identity] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _remove(self, identity: int) -> None:
        self.now -= self._known.pop(identity)
