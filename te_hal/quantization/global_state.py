"""FP8GlobalStateManager: questions about autocast and about what the backend has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.quantization import availability
from te_hal.quantization.autocast import current_frame, leave_every_autocast
from te_hal.quantization.updates import current_queue, discard_waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.recipe import Recipe


class FP8GlobalStateManager:
    """Read access to the autocast in force and to what there is, under Transformer Engine's names.

    ``is_fp8_available`` and its like give the answer and why not (an empty text where it is yes), always both.
    """

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        """Whether the backend in force runs FP8 with one scale per tensor, and why not."""
        return _both(availability.is_fp8_available)

    @staticmethod
    def is_mxfp8_available() -> tuple[bool, str]:
        """The same of MXFP8BlockScaling."""
        return _both(availability.is_mxfp8_available)

    @staticmethod
    def is_fp8_block_scaling_available() -> tuple[bool, str]:
        """The same of Float8BlockScaling."""
        return _both(availability.is_fp8_block_scaling_available)

    @staticmethod
    def is_nvfp4_available() -> tuple[bool, str]:
        """The same of NVFP4BlockScaling."""
        return _both(availability.is_nvfp4_available)

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Key of a direction in a module's ``fp8_meta`` and ``quantizers``."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def reset() -> None:
        """Leave every autocast of the calling thread and forget waiting updates (for tests)."""
        leave_every_autocast()
        discard_waiting()

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether modules quantize now."""
        return current_frame().enabled

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Whether modules record amax without quantizing."""
        return current_frame().calibrating

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """The recipe in force, or the default one."""
        return current_frame().recipe or availability.get_default_recipe()

    @staticmethod
    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        """Update the calling thread's waiting states of one direction now."""
        current_queue().update(forward=forward)


def _both(question: Callable[..., availability.Answer]) -> tuple[bool, str]:
    answer = question(return_reason=True)
    return answer if isinstance(answer, tuple) else (answer, "")
