"""Whether a backend can run a recipe: the capability questions that a recipe raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.dispatch import ANY_DEVICE, forced_backend
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import SUPPORTED, Call, Support

if TYPE_CHECKING:
    from te_hal.dispatch import Backend
    from te_hal.recipe import Recipe

#: Per layout, whether operands a and b are forward tensors (else gradients).
_FORWARD_OPERANDS = {"fprop": (True, True), "dgrad": (False, True), "wgrad": (False, True)}


def recipe_support(recipe: Recipe, backend: Backend, device: torch.device) -> Support:
    """The backend's first no to a cast or gemm of the recipe in bf16, or yes."""
    for call in _calls(recipe, backend, device):
        answer = backend.supports(call)
        if not answer:
            return answer
    return SUPPORTED


def check_forced_backend(recipe: Recipe) -> None:
    """Refuse a recipe that the forced backend lacks; without a forced one, modules ask at their first op.

    Raises:
        UnsupportedError: with the backend's own sentence.
    """
    backend = forced_backend()
    if backend is None:
        return
    device = torch.device("cpu") if ANY_DEVICE in backend.serves else torch.device(min(backend.serves))
    answer = recipe_support(recipe, backend, device)
    if not answer:
        raise UnsupportedError(
            f"autocast: recipe {type(recipe).__name__} on backend {backend.name!r}",
            got=answer.sentence,
            accepted="a recipe that the backend has",
            todo="choose another recipe or backend (te_hal.list_backends())",
        )


def _calls(recipe: Recipe, backend: Backend, device: torch.device) -> list[Call]:
    order = backend.columnwise_order
    mode = recipe.scaling_mode
    calls = []
    for forward in (True, False):
        fmt = recipe.element_format(forward=forward)
        flags = {"dtype": fmt.dtype, "mode": mode, "rowwise": True, "columnwise": False, "columnwise_order": order}
        kinds = {"input": torch.bfloat16, "scale": torch.float32, "amax": None, "out": None}
        calls.append(Call("quantize", device, kinds, flags))
    for layout, directions in _FORWARD_OPERANDS.items():
        formats = [recipe.element_format(forward=forward) for forward in directions]
        copies = backend.gemm_copies(layout, formats[0], mode)
        kinds_ab = [
            StorageKind.of(fmt, mode, rowwise=copy == "rowwise", columnwise=copy == "columnwise", order=order)
            for fmt, copy in zip(formats, (copies.a, copies.b), strict=True)
        ]
        kinds_gemm = {"a": kinds_ab[0], "b": kinds_ab[1], "bias": None, "out": None}
        flags_gemm = {"layout": layout, "accumulate": False, "out_dtype": torch.bfloat16}
        calls.append(Call("gemm", device, kinds_gemm, flags_gemm))
    return calls
