"""What Transformer Engine's callers ask of a quantizer besides quantizing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from te_hal.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MTFP8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_hal.schema.block_scales import MTFP8_MODES
from te_hal.schema.errors import ArgumentError, UnsupportedError
from te_hal.schema.formats import FLOATS, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES, check_sizes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from te_hal.quantization.quantized_tensor import QuantizedTensor
    from te_hal.recipe import Recipe
    from te_hal.schema.storage import QuantizedStorage

_RECIPES: dict[Any, type[Recipe]] = {
    ScalingMode.TENSOR: Float8CurrentScaling,
    ScalingMode.BLOCK_1X128: Float8BlockScaling,
    ScalingMode.BLOCK_128X128: Float8BlockScaling,
    ScalingMode.MXFP8: MXFP8BlockScaling,
    **dict.fromkeys(MTFP8_MODES, MTFP8BlockScaling),
    **dict.fromkeys(NVFP4_MODES, NVFP4BlockScaling),
}


#: Attributes that a quantizer prints as.
_SHOWN = ("dtype", "rowwise_usage", "columnwise_usage", "internal")


class QuantizerInterface:
    """Mixed into Quantizer, whose own questions and casts answer these."""

    mode: Any
    quantizes: bool
    delayed: Any

    def quantize(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - see Quantizer
        """See te_hal.quantization.quantizer.Quantizer."""
        raise NotImplementedError

    def multi_quantize(self, list_of_tensors: Iterable[torch.Tensor]) -> list[QuantizedTensor | QuantizedStorage]:
        """Each of several tensors by :meth:`quantize`, in order."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensor | QuantizedStorage:
        """:meth:`quantize` without autograd."""
        with torch.no_grad():
            made: QuantizedTensor | QuantizedStorage = self.quantize(tensor)
            return made

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether :meth:`quantize` takes a tensor of this shape and dtype; what a backend lacks is not asked.

        Blocks of 128 and of 32 are shorter at the edges, so that any shape is taken; of NVFP4 both sizes are multiples
        of 16, and what is Hadamard-transformed is bf16.
        """
        if inp.dtype not in FLOATS or hasattr(inp, "quantized_storage"):
            return False
        if self.mode not in NVFP4_MODES:
            return True
        try:
            check_sizes(tuple(inp.shape))
        except ArgumentError:
            return False
        return self.mode is not ScalingMode.NVFP4_HADAMARD or inp.dtype is torch.bfloat16

    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same tensor again gives the same codes and records nothing."""
        return self.quantizes and not self.delayed and not getattr(self, "stochastic_rounding", False)

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether other processes need the codes in rows alone: with one scale a tensor those in columns follow."""
        return self.mode is ScalingMode.TENSOR

    def _get_compatible_recipe(self) -> type[Recipe]:
        """The recipe that makes such quantizers."""
        return DelayedScaling if self.delayed else _RECIPES.get(self.mode, CustomRecipe)

    @property
    def optimize_for_gemm(self) -> bool:
        """Whether scales are laid out for a product alone: never, every layout serves everything.

        Raises:
            UnsupportedError: assigning True.
        """
        return False

    @optimize_for_gemm.setter
    def optimize_for_gemm(self, value: bool) -> None:
        if value is not False:
            raise UnsupportedError(
                f"{type(self).__name__}: optimize_for_gemm",
                got=repr(value),
                accepted="False: backends take scales as Transformer Engine lays them out for everything else",
                todo="leave it as it is",
            )

    def onnx_quantize(self, tensor: torch.Tensor) -> NoReturn:
        """Refused.

        Raises:
            UnsupportedError: always.
        """
        raise self._no_onnx("onnx_quantize", tensor)

    def onnx_dequantize(self, tensor: torch.Tensor) -> NoReturn:
        """Refused.

        Raises:
            UnsupportedError: always.
        """
        raise self._no_onnx("onnx_dequantize", tensor)

    def _no_onnx(self, method: str, tensor: object) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self).__name__}.{method}",
            got=f"a {type(tensor).__name__} to export",
            accepted="models without FP8: ONNX has no operators for these formats' casts",
            todo="export a model of torch.nn's layers with these weights, see te.onnx_export",
        )

    def __repr__(self) -> str:
        facts = {"mode": self.mode.value, **{name: value for name, value in vars(self).items() if name in _SHOWN}}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in facts.items())})"
