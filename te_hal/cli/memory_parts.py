"""Which part of a model keeps how many bytes for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from te_hal.cli.training import Run

#: What is kept outside of the model's parts: by the look-ups and the loss.
ELSEWHERE = "elsewhere"


def saved_by_part(run: Run, batch: int) -> dict[str, int]:
    """Bytes that one forward pass over `batch` windows keeps, by part of the model; parameters are left out.

    A storage that several parts keep counts for the first of them.
    """
    parameters = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    parts = run.model.parts()
    seen: dict[int, tuple[str, torch.UntypedStorage]] = {}
    inside = [ELSEWHERE]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen.setdefault(storage.data_ptr(), (inside[-1], storage))
        return tensor

    hooks = []
    for name, part in parts.items():
        hooks.append(part.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        hooks.append(part.register_forward_hook(lambda *_: _leave(inside)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = run.loss(run.windows(batch))
    finally:
        for hook in hooks:
            hook.remove()
    total = dict.fromkeys([*parts, ELSEWHERE], 0)
    for name, storage in seen.values():
        total[name] += storage.nbytes()
    del loss
    return total


def _leave(inside: list[str]) -> None:
    inside.pop()
