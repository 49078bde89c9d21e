// The entries quantize, quantize_current and dequantize, and the launches behind them that fused entries share.
#pragma once

#include "../library/cast_launches.h"
#include "../library/element_dispatch.h"
#include "cast.mu"

namespace te {

// Cast input[rows, cols] as `request` says. With mode TENSOR_CURRENT `partials` holds the maxima to take the scale
// from.
int32_t launch_cast(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, const CastRequest& request,
                    uintptr_t partials, int64_t partial_count, uintptr_t stream) {
    const CastScale source = cast_scale(request, partials, partial_count);
    CastTarget target = cast_target(request);
    const int64_t count = rows * cols;
    if (count == 0) target.rowwise = target.columnwise = nullptr;  // addresses of no codes may be any
    const bool tiles = wants_transposed(request) && rows > 1 && cols > 1;
    const bool aligned = is_aligned(input, 16) && is_aligned(request.rowwise_data | request.columnwise_data, 8) &&
                         (!tiles || is_multiple(rows | cols, 8));
    return with_plain_type(input_dtype, [&](auto type) {
        return with_fp8_type(request.output_dtype, [&](auto format) {
            return with_bool(aligned, [&](auto is_aligned_type) {
                using T = decltype(type);
                using F = decltype(format);
                constexpr bool kAligned = decltype(is_aligned_type)::value;
                const auto* const elements = pointer<const typename T::Storage>(input);
                if (tiles) {
                    return launch(tiles_of(rows, cols), stream, &cast_tiles<T, F, kAligned>, elements, rows, cols,
                                  source, target);
                }
                const int64_t elements_of_block = kThreads * 8 * (8 / bytes_of_dtype(input_dtype));
                const int64_t blocks = count == 0 ? 1 : ceil_divide(count, elements_of_block);
                return launch(blocks, stream, &cast_elements<T, F, kAligned>, elements, count, source, target);
            });
        });
    });
}

inline int32_t quantize(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, uintptr_t scale,
                        uintptr_t amax, uintptr_t rowwise_data, uintptr_t columnwise_data, int32_t columnwise_order,
                        uintptr_t rowwise_scale_inv, uintptr_t columnwise_scale_inv, int32_t output_dtype,
                        uintptr_t stream) {
    const CastRequest request = {TE_HAL_MODE_TENSOR,
                                 scale,
                                 amax,
                                 0.0,
                                 0u,
                                 rowwise_data,
                                 columnwise_data,
                                 columnwise_order,
                                 rowwise_scale_inv,
                                 columnwise_scale_inv,
                                 output_dtype};
    Arguments arguments("quantize");
    arguments.plain_dtype("input_dtype", input_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .reads("input", input, elements_of(rows, cols), bytes_of_dtype(input_dtype));
    check_cast(arguments, request, rows, cols);
    const int32_t status = arguments.status();
    if (status != TE_HAL_OK) return status;
    return launch_cast(input, input_dtype, rows, cols, request, 0, 0, stream);
}

inline int32_t quantize_current(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, uintptr_t scale,
                                uintptr_t amax, double epsilon, uint32_t flags, uintptr_t rowwise_data,
                                uintptr_t columnwise_data, int32_t columnwise_order, uintptr_t rowwise_scale_inv,
                                uintptr_t columnwise_scale_inv, int32_t output_dtype, uintptr_t workspace,
                                int64_t workspace_size, uintptr_t stream) {
    const CastRequest request = {TE_HAL_MODE_TENSOR_CURRENT,
                                 scale,
                                 amax,
                                 epsilon,
                                 flags,
                                 rowwise_data,
                                 columnwise_data,
                                 columnwise_order,
                                 rowwise_scale_inv,
                                 columnwise_scale_inv,
                                 output_dtype};
    Arguments arguments("quantize_current");
    arguments.plain_dtype("input_dtype", input_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .flags(flags, TE_HAL_FLAG_POWER_OF_2)
        .reads("input", input, elements_of(rows, cols), bytes_of_dtype(input_dtype))
        .workspace(workspace, workspace_size, amax_workspace_bytes());
    check_cast(arguments, request, rows, cols);
    int32_t status = arguments.status();
    if (status != TE_HAL_OK) return status;
    status = launch_amax_of_elements(input, input_dtype, rows * cols, workspace, 0, false, stream);
    if (status != TE_HAL_OK) return status;
    return launch_cast(input, input_dtype, rows, cols, request, workspace, amax_blocks(input_dtype, rows * cols),
                       stream);
}

int32_t launch_decode(uintptr_t data, int32_t data_dtype, int64_t rows, int64_t cols, int32_t copy, uintptr_t scale_inv,
                      uintptr_t output, int32_t output_dtype, uintptr_t stream) {
    const int64_t count = rows * cols;
    const bool tiles = copy == TE_HAL_COPY_COLUMNWISE_TRANSPOSED && rows > 1 && cols > 1;
    const bool aligned = is_aligned(data, 8) && is_aligned(output, 16) && (!tiles || is_multiple(rows | cols, 8));
    return with_fp8_type(data_dtype, [&](auto format) {
        return with_plain_type(output_dtype, [&](auto type) {
            return with_bool(aligned, [&](auto is_aligned_type) {
                using T = decltype(type);
                using F = decltype(format);
                constexpr bool kAligned = decltype(is_aligned_type)::value;
                const auto* const codes = pointer<const uint8_t>(data);
                const auto* const factor = pointer<const float>(scale_inv);
                auto* const elements = pointer<typename T::Storage>(output);
                if (tiles) {
                    return launch(tiles_of(cols, rows), stream, &decode_tiles<F, T, kAligned>, codes, rows, cols,
                                  factor, elements);
                }
                return launch(ceil_divide(count, kThreads * 8 * 4), stream, &decode_elements<F, T, kAligned>, codes,
                              count, factor, elements);
            });
        });
    });
}

}  // namespace te
