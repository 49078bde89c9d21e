"""Which recipes the backend in force can run: is_fp8_available and the like, and the default recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.dispatch import ANY_DEVICE, ask_backend, current_memo, default_device, forced_backend, get_backend
from te_hal.quantization.linear_calls import gemm_call
from te_hal.quantization.recipe_support import recipe_support
from te_hal.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MTFP8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_hal.schema.errors import BackendNotFoundError, BackendUnavailableError
from te_hal.schema.support import Code, Support

if TYPE_CHECKING:
    from te_hal.dispatch import Backend
    from te_hal.recipe import Recipe

Answer = bool | tuple[bool, str]

#: Candidates for the default recipe, the most wanted first: the same one wherever it can be, as training then is.
_CANDIDATES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, MTFP8BlockScaling)


class _Latest:
    """The default recipe's class under the selection and device asked about last; autocast asks at every entry."""

    known: tuple[object, torch.device | None, type[Recipe]] = (None, None, DelayedScaling)


def get_default_recipe() -> Recipe:
    """The recipe that autocast uses when none is given: DelayedScaling with its defaults.

    Where the backend in force lacks that: the first it has of Float8CurrentScaling, Float8BlockScaling,
    MXFP8BlockScaling, MTFP8BlockScaling.
    """
    memo, device = current_memo(), default_device()
    known, of_device, kind = _Latest.known
    if known is not memo or of_device != device:
        kind = next((kind for kind in _CANDIDATES if _answer(kind())), DelayedScaling)
        _Latest.known = (memo, device, kind)
    return kind()


def is_fp8_available(return_reason: bool = False) -> Answer:
    """Whether the backend in force runs FP8 with one scale per tensor.

    Args:
        return_reason: also return why not, an empty text where it does.

    Returns:
        The answer, or the answer and the reason.
    """
    return _shaped(_answer(DelayedScaling()), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Answer:
    """Whether the backend in force runs Float8BlockScaling. See :func:`is_fp8_available`."""
    return _shaped(_answer(Float8BlockScaling()), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Answer:
    """Whether the backend in force runs MXFP8BlockScaling. See :func:`is_fp8_available`."""
    return _shaped(_answer(MXFP8BlockScaling()), return_reason)


def is_mtfp8_block_scaling_available(return_reason: bool = False) -> Answer:
    """Whether the backend in force runs MTFP8BlockScaling. See :func:`is_fp8_available`."""
    return _shaped(_answer(MTFP8BlockScaling()), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Answer:
    """Whether the backend in force runs NVFP4BlockScaling. See :func:`is_fp8_available`."""
    return _shaped(_answer(NVFP4BlockScaling()), return_reason)


def is_bf16_available(return_reason: bool = False) -> Answer:
    """Whether the backend in force multiplies bf16 tensors. See :func:`is_fp8_available`."""
    found = _backend()
    if isinstance(found, Support):
        return _shaped(found, return_reason)
    call = gemm_call("fprop", _device(found), torch.bfloat16, torch.bfloat16, torch.bfloat16)
    return _shaped(ask_backend(found, call), return_reason)


def _shaped(answer: Support, return_reason: bool) -> Answer:
    return (bool(answer), answer.sentence) if return_reason else bool(answer)


def _answer(recipe: Recipe) -> Support:
    found = _backend()
    return found if isinstance(found, Support) else recipe_support(recipe, found, _device(found))


def _backend() -> Backend | Support:
    """The backend in force, or why there is none."""
    try:
        return forced_backend() or get_backend()
    except (BackendNotFoundError, BackendUnavailableError) as error:
        return Support.no(Code.ENVIRONMENT, str(error))


def _device(backend: Backend) -> torch.device:
    """The default device where the backend takes it, else one that it does."""
    device = default_device()
    return device if backend.takes(device.type) or ANY_DEVICE in backend.serves else torch.device(min(backend.serves))
