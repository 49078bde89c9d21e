// The arguments that norm_fwd and norm_quantize have in common.
#pragma once

#include "../kernels/norm_rule.muh"
#include "arguments.h"
#include "reader_dispatch.h"

namespace te {

// As the entries have them (norm_fwd in te_hal.h).
struct NormRequest {
    int32_t norm;
    uintptr_t input;
    int32_t input_dtype;
    int64_t rows;
    int64_t cols;
    uintptr_t weight;
    int32_t weight_dtype;
    uintptr_t bias;
    int32_t bias_dtype;
    double epsilon;
    uint32_t flags;
    uintptr_t mean;
    uintptr_t rstd;
};

inline bool is_layernorm(const NormRequest& request) {
    return request.norm == TE_HAL_LAYERNORM;
}

// Everything but the flags, which are the entry's to check.
inline void check_norm(Arguments& arguments, const NormRequest& request) {
    const int64_t rows = request.rows, cols = request.cols;
    arguments.code("norm", request.norm, TE_HAL_LAYERNORM, TE_HAL_RMSNORM)
        .plain_dtype("input_dtype", request.input_dtype)
        .plain_dtype("weight_dtype", request.weight_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .at_least_zero("epsilon", request.epsilon)
        .reads("input", request.input, elements_of(rows, cols), bytes_of_dtype(request.input_dtype))
        .reads("weight", request.weight, cols, bytes_of_dtype(request.weight_dtype))
        .writes("rstd", request.rstd, rows, 4);
    if (is_layernorm(request)) {
        arguments.plain_dtype("bias_dtype", request.bias_dtype)
            .reads("bias", request.bias, cols, bytes_of_dtype(request.bias_dtype))
            .writes("mean", request.mean, rows, 4);
    } else {
        arguments.require(request.bias == 0 && request.mean == 0, "bias and mean are LayerNorm's; RMSNorm takes 0");
    }
}

inline AccessFinder norm_access(const NormRequest& request) {
    AccessFinder finder(request.cols);
    finder.reads(request.input, request.input_dtype)
        .reads(request.weight, request.weight_dtype)
        .reads(request.bias, request.bias_dtype);
    return finder;
}

inline float share_of_column(int64_t cols) {
    return cols > 0 ? static_cast<float>(1.0 / static_cast<double>(cols)) : 0.0f;
}

template <class Reader>
NormWeights<Reader> norm_weights(const NormRequest& request) {
    const int64_t cols = request.cols;
    return {make_reader<Reader>(request.weight, request.weight_dtype, cols),
            make_reader<Reader>(request.bias, request.bias_dtype, cols), is_layernorm(request),
            (request.flags & TE_HAL_FLAG_ZERO_CENTERED_GAMMA) != 0};
}

}  // namespace te
