"""Modules under Transformer Engine's names: ``import te_hal.modules as te``."""

from __future__ import annotations

from te_hal import optimizers
from te_hal.modules import ops, router
from te_hal.modules.attention import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from te_hal.modules.checkpoint import checkpoint
from te_hal.modules.cpu_offload import get_cpu_offload_context
from te_hal.modules.cross_entropy import parallel_cross_entropy
from te_hal.modules.device_questions import get_cudnn_version, get_device_compute_capability
from te_hal.modules.glu_layout import deinterleave_glu_tensor, interleave_glu_tensor
from te_hal.modules.graph import make_graphed_callables
from te_hal.modules.grouped_linear import GroupedLinear
from te_hal.modules.inference import InferenceParams
from te_hal.modules.layernorm import LayerNorm
from te_hal.modules.layernorm_linear import LayerNormLinear
from te_hal.modules.layernorm_mlp import LayerNormMLP
from te_hal.modules.linear import Linear
from te_hal.modules.memory_report import memory_report
from te_hal.modules.moe import (
    Fp8Padding,
    Fp8Unpadding,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from te_hal.modules.newton_schulz import newton_schulz
from te_hal.modules.offload_marks import mark_not_offload
from te_hal.modules.onnx_export import onnx_export
from te_hal.modules.rmsnorm import RMSNorm
from te_hal.modules.rng_tracker import CudaRNGStatesTracker, RNGStatesTracker
from te_hal.modules.saved import prepare_for_saving, restore_from_func_ctx, restore_from_saved
from te_hal.modules.state_dict import check_extra_states
from te_hal.modules.transformer import TransformerLayer
from te_hal.quantization import (
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
    FP8GlobalStateManager,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    MTFP8Quantizer,
    MTFP8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Quantizer,
    NVFP4Tensor,
    NVFP4TensorStorage,
    QuantizedStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    QuantizerRequest,
    QuantizerRole,
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mtfp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from te_hal.recipe import quantizer_factory
from te_hal.schema.errors import NotBuiltError
from te_hal.schema.formats import DType

__all__ = [
    "CudaRNGStatesTracker",
    "DType",
    "DelayedScalingRequest",
    "DotProductAttention",
    "FP8GlobalStateManager",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MTFP8Quantizer",
    "MTFP8Tensor",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "RNGStatesTracker",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "check_extra_states",
    "checkpoint",
    "deinterleave_glu_tensor",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mtfp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "mark_not_offload",
    "memory_report",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "newton_schulz",
    "onnx_export",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "prepare_for_saving",
    "quantized_model_init",
    "quantizer_factory",
    "restore_from_func_ctx",
    "restore_from_saved",
    "router",
]

#: Names of transformer_engine.pytorch that are refused, and why.
_REFUSED_NAMES = {
    "CusolverMpCtx": "it holds a handle of cuSolverMp, NVIDIA's own library; newton_schulz takes whole matrices, on "
    "any device, with ctx=None",
    "FusedMLAQUpProjRopeQuant": "it is one kernel for NVIDIA's Blackwell; Linear, RotaryPositionEmbedding and a "
    "quantizer compute the same one after the other",
    "ManualOffloadSynchronizer": "moving by hand is not built yet; get_cpu_offload_context moves by itself",
    "UserBufferQuantizationMode": "it belongs to initialize_ub",
    "destroy_ub": "it belongs to initialize_ub",
    "initialize_ub": "its buffers overlap products with communication of tensor parallelism, by NVIDIA's own kernels; "
    "there is neither here, and modules compute the same without",
}


def __getattr__(name: str) -> object:
    if name in _REFUSED_NAMES:
        raise NotBuiltError(
            f"te_hal.modules.{name}",
            got=f"a name of Transformer Engine that is refused: {_REFUSED_NAMES[name]}",
            accepted=", ".join(__all__),
            todo="docs/te_parity.md lists what is here and what is not",
        )
    msg = f"module 'te_hal.modules' has no attribute {name!r}"
    raise AttributeError(msg)
