"""Checks of what a module with FP8 gemms is called with, before anything has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.modules.activation_dtype import unusable
from te_hal.modules.arguments import check_tensor
from te_hal.modules.recompute import refuse_recompute
from te_hal.modules.transforms import refuse_transforms
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    import torch

    from te_hal.modules.fp8_module import Fp8Module
    from te_hal.quantization.autocast import Frame
    from te_hal.quantization.operand_formats import Formats


def check_call(
    module: Fp8Module, inp: object, features: tuple[str, int], is_first_microbatch: object, frame: Frame
) -> None:
    """Refuse an input or a flag that cannot work, and callers that cannot be served.

    Args:
        module: what is called.
        inp: its input.
        features: name and value of the constructor's argument that gives the input's last size.
        is_first_microbatch: as it is given.
        frame: the autocast in force.

    Raises:
        UnsupportedError: a transform of torch.func; an FP8 forward inside a backward that recomputes
            nothing.
        ArgumentTypeError: the input is no tensor.
        ArgumentError: its dtype is one that no kernel takes; its last size differs; the flag is no bool.
    """
    label, (name, size) = module.label, features
    refuse_transforms(label)
    if not frame.again:
        refuse_recompute(label, fp8=module.fp8 or frame.enabled)
    inp = check_tensor(label, inp)
    if inp.dtype not in FLOATS:
        raise unusable(label, {"input": inp, **dict(module.named_parameters(recurse=False))})
    if inp.dim() == 0 or inp.shape[-1] != size:
        raise ArgumentError(
            f"{label}: input",
            got=f"shape {tuple(inp.shape)}",
            accepted=f"[..., {size}], as {name}={size}",
            todo="check which layer feeds this one",
        )
    if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
        raise ArgumentError(
            f"{label}: is_first_microbatch",
            got=repr(is_first_microbatch),
            accepted="None, True, False",
            todo="pass a bool",
        )


def check_parameter(label: str, name: str, parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Bound kernels check no shapes, and parameters can be replaced.

    Raises:
        ArgumentError: it has another shape than the module was made with.
    """
    if parameter.shape != shape:
        raise ArgumentError(
            f"{label}: {name}",
            got=f"shape {tuple(parameter.shape)}",
            accepted=f"{shape}, the shape that the layer was made with",
            todo="make a new layer for other sizes",
        )


def check_kept_input(label: str, formats: Formats) -> None:
    """Refuse ``save_original_input`` where the backward would quantize the input by another scale than the forward.

    Raises:
        ArgumentError: the input is quantized by delayed scaling.
    """
    if formats.input is not None and formats.input.delayed:
        raise ArgumentError(
            f"{label}: save_original_input",
            got="delayed scaling",
            accepted="a recipe whose input can be quantized again in backward",
            todo="use Float8CurrentScaling, or leave save_original_input out",
        )
