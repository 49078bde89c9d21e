// The entry norm_bwd: checks, workspace, and the choice of kernels.
#pragma once

#include "../library/fused_request.h"
#include "../library/multiprocessors.h"
#include "../library/norm_request.h"
#include "norm_backward.mu"

namespace te {

inline int64_t norm_sums(int32_t norm, int64_t cols) {
    return elements_of(cols, norm == TE_HAL_LAYERNORM ? 2 : 1);
}

constexpr int64_t kLongestSummedRow = 8192;

// Of a larger device the rest stays idle: the workspace must not depend on the device.
constexpr int64_t kMostMultiprocessors = 256;

// Blocks that norm_gradients runs on: as many as the device holds at a time, so that each lives through all rows.
template <class Shape>
int64_t summing_blocks(int64_t rows, int64_t multiprocessors) {
    return smaller_of(ceil_divide(rows, Shape::kRowsOfBlock),
                      kResident<Shape> * smaller_of(multiprocessors, kMostMultiprocessors));
}

// function(RowShape<...>{}) for rows of which a thread can keep the sums.
template <class Function>
int32_t with_summing_shape(int64_t cols, const Function& function) {
    if (cols <= 32 * 8 * 4) return function(RowShape<32, 4>{});
    if (cols <= kThreads * 8) return function(RowShape<kThreads, 1>{});
    if (cols <= kThreads * 8 * 2) return function(RowShape<kThreads, 2>{});
    return function(RowShape<kThreads, 4>{});
}

inline int64_t norm_bwd_workspace_bytes(int32_t norm, int64_t rows, int64_t cols) {
    int64_t sum_rows = ceil_divide(rows, kTile);
    if (cols <= kLongestSummedRow) {
        with_summing_shape(cols, [&](auto shape) {
            sum_rows = summing_blocks<decltype(shape)>(rows, kMostMultiprocessors);
            return 0;
        });
    }
    return elements_of(sum_rows, norm_sums(norm, cols)) * 4;
}

// Rows that are read once. `sum_rows` receives how many rows of partial sums are left.
template <bool kCentered, class Reader>
int32_t launch_summed_rows(const NormBackward<Reader>& norm, int64_t& sum_rows, uintptr_t stream) {
    return with_summing_shape(norm.cols, [&](auto shape) {
        using Shape = decltype(shape);
        sum_rows = summing_blocks<Shape>(norm.rows, multiprocessors());
        return launch(sum_rows, stream, &norm_gradients<Shape, Reader, kCentered>, norm);
    });
}

// grad_input, then the partial sums. Rows stay in registers where they are bf16 and fit.
template <bool kCentered, class Reader>
int32_t launch_long_rows(const NormBackward<Reader>& norm, int64_t& sum_rows, uintptr_t stream) {
    using Held = RowShape<kThreads, Reader::kIsCheap ? 8 : 0>;
    using Looped = RowShape<kThreads, 0>;
    const bool held = norm.cols <= kThreads * 8 * 8;
    const int32_t status = launch(
        norm.rows, stream,
        held ? &norm_input_gradients<Held, Reader, kCentered> : &norm_input_gradients<Looped, Reader, kCentered>, norm);
    if (status != TE_HAL_OK) return status;
    sum_rows = ceil_divide(norm.rows, kTile);
    return launch(sum_rows * ceil_divide(norm.cols, kTile), stream, &norm_weight_gradients<Reader, kCentered>, norm);
}

inline void check_norm_gradients(Arguments& arguments, const NormRequest& request, uintptr_t grad_output,
                                 int32_t grad_dtype, uintptr_t grad_input, uintptr_t grad_weight, uintptr_t grad_bias) {
    const int64_t rows = request.rows, cols = request.cols, elements = elements_of(rows, cols);
    arguments.code("norm", request.norm, TE_HAL_LAYERNORM, TE_HAL_RMSNORM)
        .plain_dtype("grad_dtype", grad_dtype)
        .plain_dtype("input_dtype", request.input_dtype)
        .plain_dtype("weight_dtype", request.weight_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .flags(request.flags, TE_HAL_FLAG_ZERO_CENTERED_GAMMA)
        .reads("grad_output", grad_output, elements, bytes_of_dtype(grad_dtype))
        .reads("input", request.input, elements, bytes_of_dtype(request.input_dtype))
        .reads("weight", request.weight, cols, bytes_of_dtype(request.weight_dtype))
        .reads("rstd", request.rstd, rows, 4)
        .writes("grad_input", grad_input, elements, bytes_of_dtype(request.input_dtype))
        .writes("grad_weight", grad_weight, cols, bytes_of_dtype(request.weight_dtype));
    if (is_layernorm(request)) {
        arguments.reads("mean", request.mean, rows, 4)
            .writes("grad_bias", grad_bias, cols, bytes_of_dtype(request.weight_dtype));
    } else {
        arguments.require(request.mean == 0 && grad_bias == 0, "mean and grad_bias are LayerNorm's; RMSNorm takes 0");
    }
}

template <class Reader>
NormBackward<Reader> norm_backward(const NormRequest& request, uintptr_t grad_output, int32_t grad_dtype,
                                   uintptr_t grad_input, uintptr_t workspace) {
    const int64_t cols = request.cols;
    return {make_reader<Reader>(grad_output, grad_dtype, cols),
            make_reader<Reader>(request.input, request.input_dtype, cols),
            norm_weights<Reader>(request),
            pointer<const float>(request.mean),
            pointer<const float>(request.rstd),
            request.rows,
            cols,
            share_of_column(cols),
            make_writer<typename Reader::OwnWriter>(grad_input, request.input_dtype, cols),
            pointer<float>(workspace)};
}

inline int32_t norm_bwd(int32_t norm, uintptr_t grad_output, int32_t grad_dtype, uintptr_t input, int32_t input_dtype,
                        int64_t rows, int64_t cols, uintptr_t mean, uintptr_t rstd, uintptr_t weight,
                        int32_t weight_dtype, uint32_t flags, uintptr_t grad_input, uintptr_t grad_weight,
                        uintptr_t grad_bias, uintptr_t workspace, int64_t workspace_size, uintptr_t stream) {
    const NormRequest request = {norm, input, input_dtype, rows,  cols, weight, weight_dtype,
                                 0,    0,     0.0,         flags, mean, rstd};
    Arguments arguments("norm_bwd");
    check_norm_gradients(arguments, request, grad_output, grad_dtype, grad_input, grad_weight, grad_bias);
    int32_t status =
        arguments.workspace(workspace, workspace_size, norm_bwd_workspace_bytes(norm, rows, cols)).status();
    if (status != TE_HAL_OK || cols == 0) return status;
    int64_t sum_rows = 0;
    const Access access = norm_access(request).reads(grad_output, grad_dtype).writes(grad_input).found();
    const auto gradients = [&](auto reader) {
        return norm_backward<decltype(reader)>(request, grad_output, grad_dtype, grad_input, workspace);
    };
    if (rows > 0 && cols <= kLongestSummedRow) {
        status = with_each_reader(access, [&](auto reader) {
            return is_layernorm(request) ? launch_summed_rows<true>(gradients(reader), sum_rows, stream)
                                         : launch_summed_rows<false>(gradients(reader), sum_rows, stream);
        });
    } else if (rows > 0) {
        status = with_reader(access, [&](auto reader) {
            return is_layernorm(request) ? launch_long_rows<true>(gradients(reader), sum_rows, stream)
                                         : launch_long_rows<false>(gradients(reader), sum_rows, stream);
        });
    }
    if (status != TE_HAL_OK) return status;
    return launch_partial_sums(workspace, sum_rows, norm_sums(norm, cols),
                               {pointer<void>(grad_weight), pointer<void>(grad_bias), cols, weight_dtype}, stream);
}

}  // namespace te
