// activation_quantize and activation_bwd_quantize (F2, F3): an activation, or its gradient, and the cast of the result.
//
// With TENSOR_CURRENT a first pass takes the amax of the fp32 results and a second one forms them again; the results
// themselves are never written.
#pragma once

#include "../library/fused_request.h"
#include "activation.mu"

namespace te {

// The passes over [rows, cols] results of each of the source's halves. `walked` are the columns that a source counts
// by.
template <class Source>
int32_t launch_activation_cast(const Source& source, const OctetWalk& walk, const CastRequest& request, LastPass pass,
                               uintptr_t stream) {
    if (request.mode == TE_HAL_MODE_TENSOR_CURRENT) {
        auto amax_alone = plain_sink(source, 0, TE_HAL_NO_DTYPE);
        amax_alone.partials = pointer<uint32_t>(pass.partials);
        const int64_t blocks = ceil_divide(walk.rows * walk.octets_of_row, kThreads * Source::kInFlight);
        pass.partial_count = smaller_of(blocks, kMaxPartials);
        const int32_t status = launch_activation(source, walk, amax_alone, kMaxPartials, stream);
        if (status != TE_HAL_OK) return status;
    }
    return launch_last_pass(source, request, pass, stream);
}

// By a given scale to the rowwise copy alone, which has no use for tiles; a run of elements overlaps better. `done` is
// set where that is possible.
inline int32_t launch_activation_row_cast(const ActivationRequest& activation, const CastRequest& request, bool& done,
                                          uintptr_t stream) {
    const CastTarget target = cast_target(request);
    const int64_t cols = walked_cols(activation);
    const bool given = request.mode == TE_HAL_MODE_TENSOR;
    if (!given || !is_lean_sink(target, request.output_dtype) || !is_aligned(request.rowwise_data, 8)) {
        return TE_HAL_OK;
    }
    const OctetWalk walk = octet_walk(is_gated(activation.activation) ? activation.rows : 1, cols);
    const LeanCastSink<E4M3> sink = {cast_scale(request, 0, 0), target};
    return with_forward_source(activation, cols, 0, [&](const auto& source) {
        using Source = typename std::decay<decltype(source)>::type;
        done = Source::Reader::kIsCheap;
        if constexpr (Source::Reader::kIsCheap) {
            return launch_activation(source, walk, sink, kMaxBlocks, stream);
        } else {
            return static_cast<int32_t>(TE_HAL_OK);
        }
    });
}

inline int32_t activation_quantize(int32_t activation, uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols,
                                   double limit, double alpha, double offset, int32_t rounded_dtype, int32_t mode,
                                   uintptr_t scale, uintptr_t amax, double scale_epsilon, uint32_t flags,
                                   uintptr_t rowwise_data, uintptr_t columnwise_data, int32_t columnwise_order,
                                   uintptr_t rowwise_scale_inv, uintptr_t columnwise_scale_inv, int32_t output_dtype,
                                   uintptr_t workspace, int64_t workspace_size, uintptr_t stream) {
    const ActivationRequest of_activation = {activation, 0,    TE_HAL_NO_DTYPE, input, input_dtype,
                                             rows,       cols, limit,           alpha, offset};
    const CastRequest of_cast = {mode,
                                 scale,
                                 amax,
                                 scale_epsilon,
                                 flags,
                                 rowwise_data,
                                 columnwise_data,
                                 columnwise_order,
                                 rowwise_scale_inv,
                                 columnwise_scale_inv,
                                 output_dtype};
    Arguments arguments("activation_quantize");
    check_activation(arguments, of_activation);
    check_cast(arguments, of_cast, rows, cols);
    check_rounded_dtype(arguments, of_cast, rounded_dtype);
    const int32_t status = arguments.flags(flags, TE_HAL_FLAG_POWER_OF_2)
                               .workspace(workspace, workspace_size, fused_workspace_bytes(mode, rows, 0))
                               .status();
    if (status != TE_HAL_OK) return status;
    if (rows * cols == 0) return cast_nothing(of_cast, workspace, stream);
    bool done = false;
    const int32_t flat = launch_activation_row_cast(of_activation, of_cast, done, stream);
    if (done) return flat;
    const LastPass pass = {rows, cols, rounded_dtype, workspace, 0, 0};
    return with_forward_source(of_activation, cols, 0, [&](const auto& source) {
        return launch_activation_cast(source, octet_walk(rows, cols), of_cast, pass, stream);
    });
}

inline int32_t activation_bwd_quantize(int32_t activation, uintptr_t grad_output, int32_t grad_dtype, uintptr_t input,
                                       int32_t input_dtype, int64_t rows, int64_t cols, double limit, double alpha,
                                       double offset, int32_t rounded_dtype, uintptr_t grad_bias,
                                       int32_t grad_bias_dtype, int32_t mode, uintptr_t scale, uintptr_t amax,
                                       double scale_epsilon, uint32_t flags, uintptr_t rowwise_data,
                                       uintptr_t columnwise_data, int32_t columnwise_order, uintptr_t rowwise_scale_inv,
                                       uintptr_t columnwise_scale_inv, int32_t output_dtype, uintptr_t workspace,
                                       int64_t workspace_size, uintptr_t stream) {
    const ActivationRequest of_activation = {activation, grad_output, grad_dtype, input, input_dtype,
                                             rows,       cols,        limit,      alpha, offset};
    const CastRequest of_cast = {mode,
                                 scale,
                                 amax,
                                 scale_epsilon,
                                 flags,
                                 rowwise_data,
                                 columnwise_data,
                                 columnwise_order,
                                 rowwise_scale_inv,
                                 columnwise_scale_inv,
                                 output_dtype};
    const int64_t result_cols = elements_of(cols, is_gated(activation) ? 2 : 1);
    const int64_t summed_cols = grad_bias == 0 ? 0 : result_cols;
    Arguments arguments("activation_bwd_quantize");
    check_activation(arguments, of_activation);
    check_cast(arguments, of_cast, rows, result_cols);
    check_rounded_dtype(arguments, of_cast, rounded_dtype);
    if (grad_bias != 0) {
        arguments.plain_dtype("grad_bias_dtype", grad_bias_dtype)
            .writes("grad_bias", grad_bias, result_cols, bytes_of_dtype(grad_bias_dtype));
    }
    int32_t status = arguments.flags(flags, TE_HAL_FLAG_POWER_OF_2)
                         .workspace(workspace, workspace_size, fused_workspace_bytes(mode, rows, summed_cols))
                         .status();
    if (status != TE_HAL_OK) return status;
    const uintptr_t sums = grad_bias == 0 ? 0 : column_sums_in(workspace);
    if (rows * cols == 0) {
        status = cast_nothing(of_cast, workspace, stream);
    } else {
        const LastPass pass = {rows, cols, rounded_dtype, workspace, 0, sums};
        status = with_backward_source(of_activation, cols, 0, [&](const auto& source) {
            return launch_activation_cast(source, octet_walk(rows, cols), of_cast, pass, stream);
        });
    }
    return status != TE_HAL_OK ? status
                               : launch_column_sums(sums, rows, result_cols, grad_bias, grad_bias_dtype, stream);
}

}  // namespace te
