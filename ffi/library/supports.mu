// The entries supports and workspace_bytes: one answer per op, from the file of its family.
#pragma once

#include "arguments.h"
#include "cast_launches.h"
#include "fp4_scales.h"
#include "supports_families.h"

namespace te {

inline bool is_plain_dtype(int32_t dtype) {
    return dtype >= TE_HAL_FLOAT32 && dtype <= TE_HAL_BFLOAT16;
}
inline bool is_fp8_dtype(int32_t dtype) {
    return dtype == TE_HAL_FLOAT8_E4M3 || dtype == TE_HAL_FLOAT8_E5M2;
}

inline int32_t refuse_call(const char* sentence) {
    return fail(TE_HAL_UNSUPPORTED, "%s", sentence);
}

inline int32_t supports_nvfp4_cast(const te_hal_call& call) {
    const bool columnwise = (call.flags & TE_HAL_FLAG_COLUMNWISE) != 0;
    if (call.output_dtype != TE_HAL_FLOAT4_E2M1) return refuse_call("the codes of NVFP4 are E2M1");
    if (columnwise && call.columnwise_order != TE_HAL_ORDER_TRANSPOSED) {
        return refuse_call("a columnwise copy of NVFP4 lies transposed");
    }
    if (call.output_mode == TE_HAL_MODE_NVFP4_HADAMARD && columnwise && call.input_dtype != TE_HAL_BFLOAT16) {
        return refuse_call("Hadamard's transform takes bf16 alone; compute in bf16, or leave the transform out");
    }
    if ((call.flags & TE_HAL_FLAG_BY_CHANCE) != 0 && call.output_mode == TE_HAL_MODE_NVFP4_16X16) {
        return refuse_call("squares of NVFP4 are rounded to the nearest");
    }
    return TE_HAL_OK;
}

inline int32_t supports_cast_of(const te_hal_call& call) {
    if (!is_plain_dtype(call.input_dtype)) return refuse_call("the input must be fp32, fp16 or bf16");
    if (is_nvfp4(call.output_mode)) return supports_nvfp4_cast(call);
    if (!is_fp8_dtype(call.output_dtype)) return refuse_call("results are E4M3 or E5M2");
    if (call.output_mode == TE_HAL_MODE_NONE) return refuse_call("a cast needs a scaling mode");
    return TE_HAL_OK;
}

inline int32_t supports_dequantize(const te_hal_call& call) {
    const bool fp4 = is_nvfp4(call.input_mode);
    if (fp4 && call.input_dtype != TE_HAL_FLOAT4_E2M1) return refuse_call("the codes of NVFP4 are E2M1");
    if (fp4 && call.input_copy == TE_HAL_COPY_COLUMNWISE_SAME) {
        return refuse_call("a columnwise copy of NVFP4 lies transposed");
    }
    if (!fp4 && !is_fp8_dtype(call.input_dtype)) return refuse_call("the data must be E4M3 or E5M2");
    if (!is_plain_dtype(call.output_dtype)) return refuse_call("the result is fp32, fp16 or bf16");
    if (call.input_mode == TE_HAL_MODE_NONE) return refuse_call("the data must be quantized");
    return TE_HAL_OK;
}

// The codes that an op has as its kind; those without a kind have 0.
inline void check_kind(Arguments& arguments, const te_hal_call& call) {
    switch (call.op) {
        case TE_HAL_OP_GEMM:
            arguments.code("kind (te_hal_layout)", call.kind, TE_HAL_LAYOUT_FPROP, TE_HAL_LAYOUT_WGRAD);
            return;
        case TE_HAL_OP_NORM_FWD:
        case TE_HAL_OP_NORM_BWD:
        case TE_HAL_OP_NORM_QUANTIZE:
            arguments.code("kind (te_hal_norm)", call.kind, TE_HAL_LAYERNORM, TE_HAL_RMSNORM);
            return;
        case TE_HAL_OP_SOFTMAX_FWD:
        case TE_HAL_OP_SOFTMAX_BWD:
            arguments.code("kind (te_hal_causal)", call.kind, TE_HAL_CAUSAL_NONE, TE_HAL_CAUSAL_BOTTOM_RIGHT);
            return;
        case TE_HAL_OP_ACTIVATION_FWD:
        case TE_HAL_OP_ACTIVATION_BWD:
        case TE_HAL_OP_ACTIVATION_QUANTIZE:
        case TE_HAL_OP_ACTIVATION_BWD_QUANTIZE:
        case TE_HAL_OP_BIAS_ACTIVATION_FWD:
        case TE_HAL_OP_BIAS_ACTIVATION_BWD:
            arguments.code("kind (te_hal_activation)", call.kind, TE_HAL_GELU, TE_HAL_CLAMPED_SWIGLU);
            return;
        default:
            arguments.code("kind, which this op has none of,", call.kind, 0, 0);
    }
}

inline bool has_quantized_result(int32_t op) {
    return op == TE_HAL_OP_QUANTIZE || (op >= TE_HAL_OP_NORM_QUANTIZE && op <= TE_HAL_OP_BIAS_GRAD_QUANTIZE);
}

inline int32_t supports_op(const te_hal_call& call) {
    switch (call.op) {
        case TE_HAL_OP_TRANSPOSE:
        case TE_HAL_OP_COMPUTE_SCALE:
        case TE_HAL_OP_UPDATE_DELAYED_SCALE:
            return TE_HAL_OK;
        case TE_HAL_OP_AMAX:
            return is_plain_dtype(call.input_dtype) ? TE_HAL_OK : refuse_call("the input must be fp32, fp16 or bf16");
        case TE_HAL_OP_QUANTIZE:
            return supports_cast_of(call);
        case TE_HAL_OP_DEQUANTIZE:
            return supports_dequantize(call);
        case TE_HAL_OP_GEMM:
            return supports_gemm(call);
        case TE_HAL_OP_NORM_FWD:
        case TE_HAL_OP_NORM_BWD:
        case TE_HAL_OP_NORM_QUANTIZE:
            return supports_norm(call);
        case TE_HAL_OP_SOFTMAX_FWD:
        case TE_HAL_OP_SOFTMAX_BWD:
            return supports_softmax(call);
        case TE_HAL_OP_ACTIVATION_FWD:
        case TE_HAL_OP_ACTIVATION_BWD:
        case TE_HAL_OP_ACTIVATION_QUANTIZE:
        case TE_HAL_OP_ACTIVATION_BWD_QUANTIZE:
            return supports_activation(call);
        case TE_HAL_OP_BIAS_GRAD:
        case TE_HAL_OP_BIAS_GRAD_QUANTIZE:
            return supports_bias_grad(call);
        case TE_HAL_OP_BIAS_ACTIVATION_FWD:
        case TE_HAL_OP_BIAS_ACTIVATION_BWD:
        case TE_HAL_OP_BIAS_RESIDUAL:
            return supports_biased(call);
        default:
            return refuse_call("no kernel for this op");
    }
}

constexpr int32_t kFirstOp = TE_HAL_OP_TRANSPOSE;
constexpr int32_t kLastOp = TE_HAL_OP_BIAS_RESIDUAL;
constexpr uint32_t kAllFlags = 255;

inline int32_t supports(const te_hal_call* asked) {
    Arguments arguments("supports");
    int32_t status = arguments.require(asked != nullptr, "call is null").status();
    if (status != TE_HAL_OK) return status;
    te_hal_call call = {};
    memcpy(&call, asked, asked->struct_size < sizeof call ? asked->struct_size : sizeof call);
    status = arguments.require(asked->struct_size >= offsetof(te_hal_call, kind), "struct_size is too small")
                 .code("op", call.op, kFirstOp, kLastOp)
                 .flags(call.flags, kAllFlags)
                 .code("input_dtype", call.input_dtype, TE_HAL_NO_DTYPE, TE_HAL_FLOAT4_E2M1)
                 .code("other_dtype", call.other_dtype, TE_HAL_NO_DTYPE, TE_HAL_FLOAT4_E2M1)
                 .code("bias_dtype", call.bias_dtype, TE_HAL_NO_DTYPE, TE_HAL_FLOAT4_E2M1)
                 .code("output_dtype", call.output_dtype, TE_HAL_NO_DTYPE, TE_HAL_FLOAT4_E2M1)
                 .code("input_mode", call.input_mode, TE_HAL_MODE_NONE, TE_HAL_MODE_MTFP8_128X128)
                 .code("other_mode", call.other_mode, TE_HAL_MODE_NONE, TE_HAL_MODE_MTFP8_128X128)
                 .code("output_mode", call.output_mode, TE_HAL_MODE_NONE, TE_HAL_MODE_MTFP8_128X128)
                 .code("input_copy", call.input_copy, TE_HAL_COPY_ROWWISE, TE_HAL_COPY_COLUMNWISE_SAME)
                 .code("other_copy", call.other_copy, TE_HAL_COPY_ROWWISE, TE_HAL_COPY_COLUMNWISE_SAME)
                 .code("columnwise_order", call.columnwise_order, TE_HAL_ORDER_TRANSPOSED, TE_HAL_ORDER_SAME)
                 .size("rows", call.rows)
                 .size("cols", call.cols)
                 .size("depth", call.depth)
                 .product("rows * cols", call.rows, call.cols)
                 .product("rows * depth", call.rows, call.depth)
                 .product("cols * depth", call.cols, call.depth)
                 .require(call.output_mode == TE_HAL_MODE_NONE || has_quantized_result(call.op),
                          "output_mode is given; accepted: TE_HAL_MODE_NONE where the result is not quantized")
                 .status();
    if (status != TE_HAL_OK) return status;
    check_kind(arguments, call);
    status = arguments.status();
    return status == TE_HAL_OK ? supports_op(call) : status;
}

inline int64_t workspace_bytes(int32_t op, int32_t kind, int32_t input_dtype, int32_t output_mode, int64_t rows,
                               int64_t cols) {
    const int32_t status = Arguments("workspace_bytes")
                               .code("op", op, kFirstOp, kLastOp)
                               .code("input_dtype", input_dtype, TE_HAL_NO_DTYPE, TE_HAL_FLOAT4_E2M1)
                               .code("output_mode", output_mode, TE_HAL_MODE_NONE, TE_HAL_MODE_MTFP8_128X128)
                               .size("rows", rows)
                               .size("cols", cols)
                               .product("rows * cols", rows, cols)
                               .status();
    if (status != TE_HAL_OK) return -status;
    switch (op) {
        case TE_HAL_OP_AMAX:
            return amax_workspace_bytes();
        case TE_HAL_OP_QUANTIZE:
            if (is_nvfp4(output_mode)) return 2 * amax_workspace_bytes();
            return output_mode == TE_HAL_MODE_TENSOR_CURRENT ? amax_workspace_bytes() : 0;
        default:
            return family_workspace_bytes(op, kind, output_mode, rows, cols);
    }
}

}  // namespace te
