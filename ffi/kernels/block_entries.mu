// The entries quantize_blocks and dequantize.
#pragma once

#include "../library/block_scales.h"
#include "../library/cast_launches.h"
#include "../library/device.h"
#include "../library/element_dispatch.h"
#include "../library/fp4_scales.h"
#include "../library/launch.h"
#include "block_cast.mu"
#include "block_decode.mu"

namespace te {

inline float largest_finite_of(int32_t dtype) {
    const uint32_t bits = dtype == TE_HAL_FLOAT32   ? Float32::kLargestFinite
                          : dtype == TE_HAL_FLOAT16 ? Float16::kLargestFinite
                                                    : BFloat16::kLargestFinite;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// One copy of the result, as the entry has it.
struct BlockCopy {
    const char* data_name;
    const char* scale_name;
    bool rowwise;
    uintptr_t data;
    uintptr_t scale_inv;
    int64_t row_stride;
    int64_t col_stride;

    template <class ScaleInv>
    ScaleGrid<ScaleInv> grid() const {
        return {pointer<ScaleInv>(scale_inv), row_stride, col_stride};
    }
};

inline void check_block_copy(Arguments& arguments, const BlockCopy& copy, int32_t mode, int64_t rows, int64_t cols) {
    if (copy.data == 0) {
        arguments.require(copy.scale_inv == 0, "a scale_inv is given without its data");
        return;
    }
    const BlockShape shape = block_shape(mode, copy.rowwise);
    check_scale_strides(arguments, shape, rows, cols, copy.row_stride, copy.col_stride);
    const int64_t extent = scale_extent(shape, rows, cols, copy.row_stride, copy.col_stride);
    arguments.writes(copy.data_name, copy.data, elements_of(rows, cols), 1)
        .writes(copy.scale_name, copy.scale_inv, extent, scale_bytes(mode));
}

// quantize_blocks, with the two copies together.
struct BlockRequest {
    uintptr_t input;
    int32_t input_dtype;
    int64_t rows;
    int64_t cols;
    int32_t mode;
    double epsilon;
    uint32_t flags;
    BlockCopy rowwise;
    BlockCopy columnwise;
    int32_t columnwise_order;
    int32_t output_dtype;
};

inline int32_t check_block_request(const BlockRequest& request) {
    const bool has_rule = request.mode == TE_HAL_MODE_BLOCK_1X128 || request.mode == TE_HAL_MODE_BLOCK_128X128;
    const int64_t elements = elements_of(request.rows, request.cols);
    Arguments arguments("quantize_blocks");
    arguments.plain_dtype("input_dtype", request.input_dtype)
        .fp8_dtype("output_dtype", request.output_dtype)
        .size("rows", request.rows)
        .size("cols", request.cols)
        .product("rows * cols", request.rows, request.cols)
        .code("mode", request.mode, TE_HAL_MODE_BLOCK_1X128, TE_HAL_MODE_MTFP8_128X128)
        .require(!is_nvfp4(request.mode), "mode is one of NVFP4; accepted by quantize_nvfp4")
        .code("columnwise_order", request.columnwise_order, TE_HAL_ORDER_TRANSPOSED, TE_HAL_ORDER_SAME)
        .at_least_zero("epsilon", request.epsilon)
        .flags(request.flags, has_rule ? static_cast<uint32_t>(TE_HAL_FLAG_POWER_OF_2) : 0u)
        .require(has_rule || request.epsilon == 0.0, "epsilon is not 0, as MXFP8 and MTFP8 have it")
        .require(elements == 0 || request.rowwise.data != 0 || request.columnwise.data != 0,
                 "rowwise_data and columnwise_data are both null; accepted: one or both")
        .reads("input", request.input, elements, bytes_of_dtype(request.input_dtype));
    check_block_copy(arguments, request.rowwise, request.mode, request.rows, request.cols);
    check_block_copy(arguments, request.columnwise, request.mode, request.rows, request.cols);
    return arguments.status();
}

template <class ScaleInv>
BlockTarget<ScaleInv> block_target(const BlockRequest& request) {
    const float fp8_max = request.output_dtype == TE_HAL_FLOAT8_E4M3 ? E4M3::kMax : E5M2::kMax;
    const bool power_of_2 = (request.flags & TE_HAL_FLAG_POWER_OF_2) != 0;
    return {pointer<uint8_t>(request.rowwise.data),
            pointer<uint8_t>(request.columnwise.data),
            request.columnwise_order == TE_HAL_ORDER_TRANSPOSED,
            request.rowwise.grid<ScaleInv>(),
            request.columnwise.grid<ScaleInv>(),
            {fp8_max, static_cast<float>(request.epsilon), largest_finite_of(request.input_dtype), power_of_2},
            encoder_choice()};
}

template <class T, class F, bool kAligned>
int32_t launch_block_cast(const BlockRequest& request, uintptr_t stream) {
    const auto* const input = pointer<const typename T::Storage>(request.input);
    const int64_t rows = request.rows, cols = request.cols, blocks = tiles_of(rows, cols);
    switch (request.mode) {
        case TE_HAL_MODE_BLOCK_1X128:
            return launch(blocks, stream, &cast_vector_blocks<Float32Scales, T, F, kAligned>, input, rows, cols,
                          block_target<float>(request));
        case TE_HAL_MODE_BLOCK_128X128:
            return launch(blocks, stream, &cast_square_blocks<Float32Scales, T, F, kAligned>, input, rows, cols,
                          block_target<float>(request));
        case TE_HAL_MODE_MTFP8_1X128:
            return launch(blocks, stream, &cast_vector_blocks<Mtfp8Scales, T, F, kAligned>, input, rows, cols,
                          block_target<float>(request));
        case TE_HAL_MODE_MTFP8_128X128:
            return launch(blocks, stream, &cast_square_blocks<Mtfp8Scales, T, F, kAligned>, input, rows, cols,
                          block_target<float>(request));
        default:
            return launch(blocks, stream, &cast_vector_blocks<E8M0Scales, T, F, kAligned>, input, rows, cols,
                          block_target<uint8_t>(request));
    }
}

inline int32_t quantize_blocks(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, int32_t mode,
                               double epsilon, uint32_t flags, uintptr_t rowwise_data, uintptr_t rowwise_scale_inv,
                               int64_t rowwise_scale_row_stride, int64_t rowwise_scale_col_stride,
                               uintptr_t columnwise_data, uintptr_t columnwise_scale_inv,
                               int64_t columnwise_scale_row_stride, int64_t columnwise_scale_col_stride,
                               int32_t columnwise_order, int32_t output_dtype, uintptr_t stream) {
    const BlockRequest request = {input,
                                  input_dtype,
                                  rows,
                                  cols,
                                  mode,
                                  epsilon,
                                  flags,
                                  {"rowwise_data", "rowwise_scale_inv", true, rowwise_data, rowwise_scale_inv,
                                   rowwise_scale_row_stride, rowwise_scale_col_stride},
                                  {"columnwise_data", "columnwise_scale_inv", false, columnwise_data,
                                   columnwise_scale_inv, columnwise_scale_row_stride, columnwise_scale_col_stride},
                                  columnwise_order,
                                  output_dtype};
    const int32_t status = check_block_request(request);
    if (status != TE_HAL_OK || elements_of(rows, cols) == 0) return status;
    const bool aligned =
        is_aligned(input, 16) && is_aligned(rowwise_data | columnwise_data, 8) && is_multiple(rows | cols, 8);
    return with_plain_type(input_dtype, [&](auto type) {
        return with_fp8_type(output_dtype, [&](auto format) {
            return with_bool(aligned, [&](auto is_aligned_type) {
                return launch_block_cast<decltype(type), decltype(format), decltype(is_aligned_type)::value>(request,
                                                                                                             stream);
            });
        });
    });
}

template <class ScaleInv>
ScaleLookup<ScaleInv> scale_lookup(uintptr_t scale_inv, int64_t row_stride, int64_t col_stride, BlockShape shape) {
    return {pointer<const ScaleInv>(scale_inv), row_stride, col_stride, shape.row_shift, shape.col_shift};
}

template <class ScaleInv>
int32_t launch_block_decode(uintptr_t data, int32_t data_dtype, int64_t rows, int64_t cols, int32_t copy,
                            const ScaleLookup<ScaleInv>& scales, uintptr_t output, int32_t output_dtype,
                            uintptr_t stream) {
    const bool transposed = copy == TE_HAL_COPY_COLUMNWISE_TRANSPOSED;
    const int64_t row_step = transposed ? 1 : cols, col_step = transposed ? rows : 1;
    return with_fp8_type(data_dtype, [&](auto format) {
        return with_plain_type(output_dtype, [&](auto type) {
            using T = decltype(type);
            return launch(ceil_divide(rows * ceil_divide(cols, 8), kThreads), stream,
                          &decode_blocks<decltype(format), T, ScaleInv>, pointer<const uint8_t>(data), rows, cols,
                          row_step, col_step, scales, pointer<typename T::Storage>(output));
        });
    });
}

inline int32_t dequantize(uintptr_t data, int32_t data_dtype, int64_t rows, int64_t cols, int32_t copy, int32_t mode,
                          uintptr_t scale_inv, int64_t scale_row_stride, int64_t scale_col_stride, uintptr_t output,
                          int32_t output_dtype, uintptr_t stream) {
    const bool per_tensor = mode == TE_HAL_MODE_TENSOR || mode == TE_HAL_MODE_TENSOR_CURRENT;
    const int64_t elements = elements_of(rows, cols);
    const BlockShape shape = block_shape(mode, copy == TE_HAL_COPY_ROWWISE);
    Arguments arguments("dequantize");
    arguments.fp8_dtype("data_dtype", data_dtype)
        .plain_dtype("output_dtype", output_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .code("copy", copy, TE_HAL_COPY_ROWWISE, TE_HAL_COPY_COLUMNWISE_SAME)
        .code("mode", mode, TE_HAL_MODE_TENSOR, TE_HAL_MODE_MTFP8_128X128)
        .require(!is_nvfp4(mode), "mode is one of NVFP4; accepted by dequantize_nvfp4")
        .reads("data", data, elements, 1)
        .writes("output", output, elements, bytes_of_dtype(output_dtype));
    arguments.require(!per_tensor || (scale_row_stride == 0 && scale_col_stride == 0),
                      "one scale has no strides; accepted: 0 and 0");
    if (!per_tensor) check_scale_strides(arguments, shape, rows, cols, scale_row_stride, scale_col_stride);
    const int64_t extent =
        per_tensor ? elements != 0 : scale_extent(shape, rows, cols, scale_row_stride, scale_col_stride);
    const int32_t status = arguments.reads("scale_inv", scale_inv, extent, per_tensor ? 4 : scale_bytes(mode)).status();
    if (status != TE_HAL_OK || elements == 0) return status;
    if (per_tensor) {
        return launch_decode(data, data_dtype, rows, cols, copy, scale_inv, output, output_dtype, stream);
    }
    if (mode == TE_HAL_MODE_MXFP8) {
        const auto scales = scale_lookup<uint8_t>(scale_inv, scale_row_stride, scale_col_stride, shape);
        return launch_block_decode(data, data_dtype, rows, cols, copy, scales, output, output_dtype, stream);
    }
    const auto scales = scale_lookup<float>(scale_inv, scale_row_stride, scale_col_stride, shape);
    return launch_block_decode(data, data_dtype, rows, cols, copy, scales, output, output_dtype, stream);
}

}  // namespace te
