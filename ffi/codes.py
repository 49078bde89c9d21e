"""The numbers of te_hal.h's enums, by the schemas' own words. tests/ffi/test_binding.py holds them to the header."""

from __future__ import annotations

import torch

from te_hal.schema.activation import ACTIVATIONS
from te_hal.schema.formats import E2M1, ColumnwiseOrder, ScalingMode

NO_DTYPE = 0
DTYPES = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    E2M1.dtype: 6,
}
MODE_NONE = 0
MODE_TENSOR_CURRENT = 2
MODES = {
    ScalingMode.TENSOR: 1,
    ScalingMode.BLOCK_1X128: 3,
    ScalingMode.BLOCK_128X128: 4,
    ScalingMode.MXFP8: 5,
    ScalingMode.NVFP4: 6,
    ScalingMode.NVFP4_16X16: 7,
    ScalingMode.NVFP4_HADAMARD: 8,
    ScalingMode.MTFP8_1X128: 9,
    ScalingMode.MTFP8_128X128: 10,
}
ORDERS = {ColumnwiseOrder.TRANSPOSED: 0, ColumnwiseOrder.SAME: 1}
COPY_ROWWISE = 0
COPIES = {ColumnwiseOrder.TRANSPOSED: 1, ColumnwiseOrder.SAME: 2}  #: of a columnwise copy, by its order
LAYOUTS = {"fprop": 0, "dgrad": 1, "wgrad": 2}
LAYERNORM, RMSNORM = 1, 2
ACTIVATION_KINDS = {name: number for number, name in enumerate(ACTIVATIONS, start=1)}
CAUSAL = {"none": 0, "top_left": 1, "bottom_right": 2}
AMAX_ALGOS = {"max": 0, "most_recent": 1}
FLAG_ACCUMULATE, FLAG_POWER_OF_2, FLAG_ZERO_CENTERED_GAMMA = 1, 2, 4
FLAG_ROWWISE, FLAG_COLUMNWISE, FLAG_MASK = 8, 16, 32
FLAG_BY_CHANCE, FLAG_UNSCALED = 64, 128
OPS = {
    "transpose": 1,
    "amax": 2,
    "compute_scale": 3,
    "update_delayed_scale": 4,
    "quantize": 5,
    "dequantize": 6,
    "gemm": 7,
    "bias_grad": 8,
    "norm_fwd": 9,
    "norm_bwd": 10,
    "softmax_fwd": 11,
    "softmax_bwd": 12,
    "activation_fwd": 13,
    "activation_bwd": 14,
    "norm_quantize": 15,
    "activation_quantize": 16,
    "activation_bwd_quantize": 17,
    "bias_grad_quantize": 18,
    "bias_activation_fwd": 19,
    "bias_activation_bwd": 20,
    "bias_residual": 21,
}
