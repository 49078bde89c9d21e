"""AdamW on fp32 master weights, and what a step tells about the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from torch import nn

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_LARGEST_NORM = 1.0


@dataclass(frozen=True)
class Gradients:
    """What one step's gradients were, before clipping.

    Attributes:
        norm: L2 norm over all parameters.
        nonfinite: how many elements were NaN or infinite.
    """

    norm: float
    nonfinite: int


class MasterAdamW:
    """AdamW with gradient clipping; parameters below fp32 follow fp32 masters.

    Every run takes the same steps from the same values this way, and what differs is how products are computed,
    not which updates are too small for a bf16 weight. An fp32 parameter is its own master.

    Args:
        model: with fp32 parameters; they become `dtype` on `device`.
        dtype: of the parameters from now on.
        device: where parameters, masters and moments live.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        masters = [p.detach().to(device, torch.float32, copy=True) for p in model.parameters()]
        model.to(device=device, dtype=dtype)
        self._parameters = list(model.parameters())
        if dtype == torch.float32:
            masters = [p.detach() for p in self._parameters]
        self._masters = masters
        self._adamw = torch.optim.AdamW(masters, betas=_BETAS, weight_decay=_WEIGHT_DECAY, foreach=True)

    @torch.no_grad()
    def step(self, lr: float) -> Gradients:
        """Update masters and parameters from the parameters' gradients, and drop those.

        A gradient that is not finite is applied like any other: the run then shows what became of it.
        """
        gradients = []
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
            gradients += [] if master.grad is None else [master.grad]
        norm = get_total_norm(gradients)
        nonfinite = 0
        if not norm.isfinite():
            nonfinite = sum(int((~gradient.isfinite()).sum()) for gradient in gradients)
        clip_grads_with_norm_(self._masters, _LARGEST_NORM, norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter.dtype != master.dtype:
                parameter.copy_(master)
        return Gradients(norm.item(), nonfinite)

    def nbytes(self) -> int:
        """Bytes of moments, and of masters that are not parameters themselves."""
        moments = [t for state in self._adamw.state.values() for t in state.values()]
        own = [m for m, p in zip(self._masters, self._parameters, strict=True) if m.dtype != p.dtype]
        return sum(tensor.nbytes for tensor in (*own, *moments))

    def state_dict(self) -> dict[str, Any]:
        """Masters and moments; shares their memory."""
        return {"masters": list(self._masters), "adamw": self._adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy masters and moments from `state`; parameters are the model's own to restore."""
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        self._adamw.load_state_dict(state["adamw"])
