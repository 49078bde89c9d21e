// supports() and workspace_bytes() for gemm, norms, softmax, activations and the fused ops.
#pragma once

#include "../kernels/activation_quantize.mu"
#include "../kernels/bias_grad.mu"
#include "../kernels/biased.mu"
#include "../kernels/norm_backward_entry.mu"
#include "error.h"
#include "fp4_scales.h"

namespace te {

inline bool all_plain(int32_t a, int32_t b, int32_t c) {
    const auto plain = [](int32_t dtype) { return dtype >= TE_HAL_FLOAT32 && dtype <= TE_HAL_BFLOAT16; };
    return plain(a) && plain(b) && plain(c);
}

// What a fused op's result must be.
inline int32_t supports_cast_result(const te_hal_call& call) {
    if (call.output_dtype != TE_HAL_FLOAT8_E4M3 && call.output_dtype != TE_HAL_FLOAT8_E5M2) {
        return fail(TE_HAL_UNSUPPORTED, "a fused op's result is E4M3 or E5M2");
    }
    if (call.output_mode != TE_HAL_MODE_TENSOR && call.output_mode != TE_HAL_MODE_TENSOR_CURRENT) {
        return fail(TE_HAL_UNSUPPORTED, "a fused op scales per tensor; other modes need the op and then the cast");
    }
    return TE_HAL_OK;
}

inline int32_t supports_operand(int32_t dtype, int32_t mode, int32_t copy) {
    const bool fp8 = dtype == TE_HAL_FLOAT8_E4M3 || dtype == TE_HAL_FLOAT8_E5M2;
    if (is_nvfp4(mode)) {
        const bool fits = dtype == TE_HAL_FLOAT4_E2M1 && copy != TE_HAL_COPY_COLUMNWISE_SAME;
        return fits ? TE_HAL_OK
                    : fail(TE_HAL_UNSUPPORTED, "an operand in NVFP4 is E2M1, its columnwise copy transposed");
    }
    if (mode == TE_HAL_MODE_NONE && (!all_plain(dtype, dtype, dtype) || copy != TE_HAL_COPY_ROWWISE)) {
        return fail(TE_HAL_UNSUPPORTED, "an operand that is not quantized is fp32, fp16 or bf16");
    }
    if (mode != TE_HAL_MODE_NONE && !fp8) return fail(TE_HAL_UNSUPPORTED, "a quantized operand is E4M3 or E5M2");
    return TE_HAL_OK;
}

inline int32_t supports_gemm(const te_hal_call& call) {
    if (call.bias_dtype != TE_HAL_NO_DTYPE && call.kind != TE_HAL_LAYOUT_FPROP) {
        return fail(TE_HAL_UNSUPPORTED, "a bias goes with TE_HAL_LAYOUT_FPROP only");
    }
    const int32_t bias = call.bias_dtype == TE_HAL_NO_DTYPE ? call.output_dtype : call.bias_dtype;
    if (!all_plain(call.output_dtype, bias, bias)) {
        return fail(TE_HAL_UNSUPPORTED, "the result and the bias of a product are fp32, fp16 or bf16");
    }
    const int32_t status = supports_operand(call.input_dtype, call.input_mode, call.input_copy);
    return status != TE_HAL_OK ? status : supports_operand(call.other_dtype, call.other_mode, call.other_copy);
}

inline int32_t supports_norm(const te_hal_call& call) {
    const bool has_third = call.op == TE_HAL_OP_NORM_BWD || call.kind == TE_HAL_LAYERNORM;
    if (!all_plain(call.input_dtype, call.other_dtype, has_third ? call.bias_dtype : call.input_dtype)) {
        return fail(TE_HAL_UNSUPPORTED, "the operands of a norm are fp32, fp16 or bf16");
    }
    if (call.op == TE_HAL_OP_NORM_QUANTIZE) return supports_cast_result(call);
    if (call.op == TE_HAL_OP_NORM_FWD && !all_plain(call.output_dtype, call.output_dtype, call.output_dtype)) {
        return fail(TE_HAL_UNSUPPORTED, "the result of a norm is fp32, fp16 or bf16");
    }
    return TE_HAL_OK;
}

inline int32_t supports_softmax(const te_hal_call& call) {
    const bool backward = call.op == TE_HAL_OP_SOFTMAX_BWD;
    if (!all_plain(call.input_dtype, backward ? call.other_dtype : call.output_dtype, call.input_dtype)) {
        return fail(TE_HAL_UNSUPPORTED, "the operands and the result of a softmax are fp32, fp16 or bf16");
    }
    return TE_HAL_OK;
}

inline int32_t supports_activation(const te_hal_call& call) {
    const bool backward = call.op == TE_HAL_OP_ACTIVATION_BWD || call.op == TE_HAL_OP_ACTIVATION_BWD_QUANTIZE;
    const bool fused = call.op == TE_HAL_OP_ACTIVATION_QUANTIZE || call.op == TE_HAL_OP_ACTIVATION_BWD_QUANTIZE;
    const int32_t grad = backward ? call.other_dtype : call.input_dtype;
    if (!all_plain(call.input_dtype, grad, fused ? call.input_dtype : call.output_dtype)) {
        return fail(TE_HAL_UNSUPPORTED, "the operands of an activation, and a plain result, are fp32, fp16 or bf16");
    }
    return fused ? supports_cast_result(call) : TE_HAL_OK;
}

inline int32_t supports_bias_grad(const te_hal_call& call) {
    const bool fused = call.op == TE_HAL_OP_BIAS_GRAD_QUANTIZE;
    const int32_t sums = fused ? call.bias_dtype : call.output_dtype;
    if (!all_plain(call.input_dtype, sums, sums)) {
        return fail(TE_HAL_UNSUPPORTED, "a gradient and its column sums are fp32, fp16 or bf16");
    }
    return fused ? supports_cast_result(call) : TE_HAL_OK;
}

inline int32_t supports_biased(const te_hal_call& call) {
    const bool activates = call.op != TE_HAL_OP_BIAS_RESIDUAL;
    if (activates && (call.kind < TE_HAL_GELU || call.kind >= TE_HAL_GEGLU)) {
        return fail(TE_HAL_UNSUPPORTED, "with a bias there are the activations that are not gated");
    }
    const int32_t other = call.op == TE_HAL_OP_BIAS_ACTIVATION_FWD ? call.input_dtype : call.other_dtype;
    if (!all_plain(call.input_dtype, other, call.bias_dtype) ||
        !all_plain(call.output_dtype, call.output_dtype, call.output_dtype)) {
        return fail(TE_HAL_UNSUPPORTED, "a product, what comes with it, and the result are fp32, fp16 or bf16");
    }
    return TE_HAL_OK;
}

// Of an op of these families; 0 for every other.
inline int64_t family_workspace_bytes(int32_t op, int32_t kind, int32_t mode, int64_t rows, int64_t cols) {
    switch (op) {
        case TE_HAL_OP_NORM_BWD:
            return norm_bwd_workspace_bytes(kind, rows, cols);
        case TE_HAL_OP_BIAS_GRAD:
            return bias_grad_workspace_bytes(rows, cols);
        case TE_HAL_OP_NORM_QUANTIZE:
        case TE_HAL_OP_ACTIVATION_QUANTIZE:
            return fused_workspace_bytes(mode, rows, 0);
        case TE_HAL_OP_ACTIVATION_BWD_QUANTIZE:
            return fused_workspace_bytes(mode, rows, elements_of(cols, is_gated(kind) ? 2 : 1));
        case TE_HAL_OP_BIAS_GRAD_QUANTIZE:
            return fused_workspace_bytes(mode, rows, cols);
        case TE_HAL_OP_BIAS_ACTIVATION_BWD:
            return bias_activation_workspace_bytes(rows, cols);
        default:
            return 0;
    }
}

}  // namespace te
