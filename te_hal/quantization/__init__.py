"""Quantizers, quantized tensors, scaling state and autocast."""

from __future__ import annotations

from te_hal.quantization.alignment import get_align_size_for_quantization
from te_hal.quantization.autocast import autocast, fp8_autocast
from te_hal.quantization.availability import (
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mtfp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from te_hal.quantization.block_quantizers import Float8BlockQuantizer, MTFP8Quantizer, MXFP8Quantizer
from te_hal.quantization.block_tensors import Float8BlockwiseQTensor, MTFP8Tensor, MXFP8Tensor
from te_hal.quantization.current_scaling_quantizer import Float8CurrentScalingQuantizer
from te_hal.quantization.float8_quantizer import Float8Quantizer
from te_hal.quantization.float8_tensor import Float8Tensor
from te_hal.quantization.global_state import FP8GlobalStateManager
from te_hal.quantization.hybrid_quantizer import HybridQuantizer
from te_hal.quantization.hybrid_tensor import HybridQuantizedTensor
from te_hal.quantization.identity_tensor import IdentityTensor
from te_hal.quantization.model_init import fp8_model_init, quantized_model_init
from te_hal.quantization.nvfp4_quantizer import NVFP4Quantizer
from te_hal.quantization.nvfp4_tensor import NVFP4Tensor
from te_hal.quantization.quantized_tensor import QuantizedTensor
from te_hal.quantization.quantizer import Quantizer
from te_hal.quantization.quantizer_request import DelayedScalingRequest, QuantizerRequest
from te_hal.quantization.quantizer_role import QuantizerRole
from te_hal.quantization.raw_data import replace_raw_data
from te_hal.quantization.slots import FP8BwdTensorIdx, FP8FwdTensorIdx
from te_hal.quantization.te_part_storages import HybridQuantizedTensorStorage, IdentityTensorStorage
from te_hal.quantization.te_storages import (
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
    QuantizedTensorStorage,
)
from te_hal.quantization.unquantized import IdentityQuantizer
from te_hal.schema.storage import QuantizedStorage

__all__ = [
    "DelayedScalingRequest",
    "FP8BwdTensorIdx",
    "FP8FwdTensorIdx",
    "FP8GlobalStateManager",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MTFP8Quantizer",
    "MTFP8Tensor",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mtfp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
    "replace_raw_data",
]
