// The entries quantize_blocks and dequantize.
#pragma once

#include "../library/arguments.h"
#include "../library/device.h"
#include "../library/element_dispatch.h"
#include "../library/launch.h"
#include "block_cast.mu"
#include "block_decode.mu"
#include "cast_entries.mu"

namespace te {

// Elements that share a scale, down and along the rows of the tensor, as powers of two.
struct BlockShape {
    int row_shift;
    int col_shift;
};

inline BlockShape block_shape(int32_t mode, bool rowwise) {
    if (mode == TE_HAL_MODE_BLOCK_128X128) return {7, 7};
    const int length = mode == TE_HAL_MODE_MXFP8 ? 5 : 7;
    return rowwise ? BlockShape{0, length} : BlockShape{length, 0};
}

inline int64_t scale_bytes(int32_t mode) {
    return mode == TE_HAL_MODE_MXFP8 ? 1 : 4;
}

// Elements from the first scale to the last one of a grid, so that its memory can be checked.
inline int64_t scale_extent(BlockShape shape, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
    if (elements_of(rows, cols) == 0) return 0;
    const int64_t down = (rows - 1) >> shape.row_shift, along = (cols - 1) >> shape.col_shift;
    return elements_of(down, row_stride) + elements_of(along, col_stride) + 1;
}

inline void check_scale_strides(Arguments& arguments, BlockShape shape, int64_t rows, int64_t cols, int64_t row_stride,
                                int64_t col_stride) {
    if (elements_of(rows, cols) == 0) return;
    arguments.at_least("a scale's row stride", row_stride, 1)
        .at_least("a scale's col stride", col_stride, 1)
        .product("blocks * row stride", (rows - 1) >> shape.row_shift, row_stride)
        .product("blocks * col stride", (cols - 1) >> shape.col_shift, col_stride);
}

inline float largest_finite_of(int32_t dtype) {
    const uint32_t bits = dtype == TE_HAL_FLOAT32   ? Float32::kLargestFinite
                          : dtype == TE_HAL_FLOAT16 ? Float16::kLargestFinite
                                                    : BFloat16::kLargestFinite;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// One copy's part of the arguments.
inline void check_block_copy(Arguments& arguments, const char* data_name, uintptr_t data, const char* scale_name,
                             uintptr_t scale_inv, int32_t mode, bool rowwise, int64_t rows, int64_t cols,
                             int64_t row_stride, int64_t col_stride) {
    if (data == 0) {
        arguments.require(scale_inv == 0, rowwise ? "rowwise_scale_inv is given without rowwise_data"
                                                  : "columnwise_scale_inv is given without columnwise_data");
        return;
    }
    const BlockShape shape = block_shape(mode, rowwise);
    check_scale_strides(arguments, shape, rows, cols, row_stride, col_stride);
    arguments.writes(data_name, data, elements_of(rows, cols), 1)
        .writes(scale_name, scale_inv, scale_extent(shape, rows, cols, row_stride, col_stride), scale_bytes(mode));
}

template <class ScaleInv>
BlockTarget<ScaleInv> block_target(int32_t input_dtype, double epsilon, uint32_t flags, uintptr_t rowwise_data,
                                   ScaleGrid<ScaleInv> rowwise_scales, uintptr_t columnwise_data,
                                   ScaleGrid<ScaleInv> columnwise_scales, int32_t order, int32_t output_dtype) {
    const float fp8_max = output_dtype == TE_HAL_FLOAT8_E4M3 ? E4M3::kMax : E5M2::kMax;
    return {
        pointer<uint8_t>(rowwise_data),
        pointer<uint8_t>(columnwise_data),
        order == TE_HAL_ORDER_TRANSPOSED,
        rowwise_scales,
        columnwise_scales,
        {fp8_max, static_cast<float>(epsilon), largest_finite_of(input_dtype), (flags & TE_HAL_FLAG_POWER_OF_2) != 0},
        encoder_choice()};
}

template <class T, class F, bool kAligned>
int32_t launch_block_cast(const typename T::Storage* input, int64_t rows, int64_t cols, int32_t mode,
                          const BlockTarget<float>& target, const BlockTarget<uint8_t>& mx_target, uintptr_t stream) {
    const int64_t blocks = tiles_of(rows, cols);
    switch (mode) {
        case TE_HAL_MODE_BLOCK_1X128:
            return launch(blocks, stream, &cast_vector_blocks<Float32Scales, T, F, kAligned>, input, rows, cols,
                          target);
        case TE_HAL_MODE_BLOCK_128X128:
            return launch(blocks, stream, &cast_square_blocks<T, F, kAligned>, input, rows, cols, target);
        default:
            return launch(blocks, stream, &cast_vector_blocks<E8M0Scales, T, F, kAligned>, input, rows, cols,
                          mx_target);
    }
}

inline int32_t quantize_blocks(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, int32_t mode,
                               double epsilon, uint32_t flags, uintptr_t rowwise_data, uintptr_t rowwise_scale_inv,
                               int64_t rowwise_scale_row_stride, int64_t rowwise_scale_col_stride,
                               uintptr_t columnwise_data, uintptr_t columnwise_scale_inv,
                               int64_t columnwise_scale_row_stride, int64_t columnwise_scale_col_stride,
                               int32_t columnwise_order, int32_t output_dtype, uintptr_t stream) {
    const bool mx = mode == TE_HAL_MODE_MXFP8;
    Arguments arguments("quantize_blocks");
    arguments.plain_dtype("input_dtype", input_dtype)
        .fp8_dtype("output_dtype", output_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .code("mode", mode, TE_HAL_MODE_BLOCK_1X128, TE_HAL_MODE_NVFP4)
        .unsupported_if(mode == TE_HAL_MODE_NVFP4, "no kernel for NVFP4")
        .code("columnwise_order", columnwise_order, TE_HAL_ORDER_TRANSPOSED, TE_HAL_ORDER_SAME)
        .number("epsilon", epsilon, 0.0)
        .flags(flags, mx ? 0u : static_cast<uint32_t>(TE_HAL_FLAG_POWER_OF_2))
        .require(!mx || epsilon == 0.0, "epsilon is not 0, as MXFP8 has it")
        .require(elements_of(rows, cols) == 0 || rowwise_data != 0 || columnwise_data != 0,
                 "rowwise_data and columnwise_data are both null; accepted: one or both")
        .reads("input", input, elements_of(rows, cols), bytes_of_dtype(input_dtype));
    check_block_copy(arguments, "rowwise_data", rowwise_data, "rowwise_scale_inv", rowwise_scale_inv, mode, true, rows,
                     cols, rowwise_scale_row_stride, rowwise_scale_col_stride);
    check_block_copy(arguments, "columnwise_data", columnwise_data, "columnwise_scale_inv", columnwise_scale_inv, mode,
                     false, rows, cols, columnwise_scale_row_stride, columnwise_scale_col_stride);
    const int32_t status = arguments.status();
    if (status != TE_HAL_OK || elements_of(rows, cols) == 0) return status;
    const bool aligned =
        is_aligned(input, 16) && is_aligned(rowwise_data | columnwise_data, 8) && is_multiple(rows | cols, 8);
    const auto target = block_target<float>(
        input_dtype, epsilon, flags, rowwise_data,
        {pointer<float>(rowwise_scale_inv), rowwise_scale_row_stride, rowwise_scale_col_stride}, columnwise_data,
        {pointer<float>(columnwise_scale_inv), columnwise_scale_row_stride, columnwise_scale_col_stride},
        columnwise_order, output_dtype);
    const auto mx_target = block_target<uint8_t>(
        input_dtype, epsilon, flags, rowwise_data,
        {pointer<uint8_t>(rowwise_scale_inv), rowwise_scale_row_stride, rowwise_scale_col_stride}, columnwise_data,
        {pointer<uint8_t>(columnwise_scale_inv), columnwise_scale_row_stride, columnwise_scale_col_stride},
        columnwise_order, output_dtype);
    return with_plain_type(input_dtype, [&](auto type) {
        return with_fp8_type(output_dtype, [&](auto format) {
            return with_bool(aligned, [&](auto is_aligned_type) {
                using T = decltype(type);
                return launch_block_cast<T, decltype(format), decltype(is_aligned_type)::value>(
                    pointer<const typename T::Storage>(input), rows, cols, mode, target, mx_target, stream);
            });
        });
    });
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
    const BlockShape shape = block_shape(mode, copy == TE_HAL_COPY_ROWWISE);
    Arguments arguments("dequantize");
    arguments.fp8_dtype("data_dtype", data_dtype)
        .plain_dtype("output_dtype", output_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .code("copy", copy, TE_HAL_COPY_ROWWISE, TE_HAL_COPY_COLUMNWISE_SAME)
        .code("mode", mode, TE_HAL_MODE_TENSOR, TE_HAL_MODE_NVFP4)
        .unsupported_if(mode == TE_HAL_MODE_NVFP4, "no kernel for NVFP4")
        .reads("data", data, elements_of(rows, cols), 1)
        .writes("output", output, elements_of(rows, cols), bytes_of_dtype(output_dtype));
    if (per_tensor) {
        arguments.reads("scale_inv", scale_inv, elements_of(rows, cols) == 0 ? 0 : 1, 4);
    } else {
        check_scale_strides(arguments, shape, rows, cols, scale_row_stride, scale_col_stride);
        arguments.reads("scale_inv", scale_inv, scale_extent(shape, rows, cols, scale_row_stride, scale_col_stride),
                        scale_bytes(mode));
    }
    const int32_t status = arguments.status();
    if (status != TE_HAL_OK || elements_of(rows, cols) == 0) return status;
    if (per_tensor) {
        return launch_decode(data, data_dtype, rows, cols, copy, scale_inv, output, output_dtype, stream);
    }
    if (mode == TE_HAL_MODE_MXFP8) {
        const ScaleLookup<uint8_t> scales = {pointer<const uint8_t>(scale_inv), scale_row_stride, scale_col_stride,
                                             shape.row_shift, shape.col_shift};
        return launch_block_decode(data, data_dtype, rows, cols, copy, scales, output, output_dtype, stream);
    }
    const ScaleLookup<float> scales = {pointer<const float>(scale_inv), scale_row_stride, scale_col_stride,
                                       shape.row_shift, shape.col_shift};
    return launch_block_decode(data, data_dtype, rows, cols, copy, scales, output, output_dtype, stream);
}

}  // namespace te
