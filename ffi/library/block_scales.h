// Grids of block scales, as entries take them: how large they are, and which strides make sense.
#pragma once

#include "arguments.h"

namespace te {

// Elements that share a scale, down and along the rows of the tensor, as powers of two.
struct BlockShape {
    int row_shift;
    int col_shift;
};

inline bool is_nvfp4(int32_t mode) {
    return mode >= TE_HAL_MODE_NVFP4 && mode <= TE_HAL_MODE_NVFP4_HADAMARD;
}

inline BlockShape block_shape(int32_t mode, bool rowwise) {
    if (mode == TE_HAL_MODE_BLOCK_128X128 || mode == TE_HAL_MODE_MTFP8_128X128) return {7, 7};
    const int length = mode == TE_HAL_MODE_MXFP8 ? 5 : is_nvfp4(mode) ? 4 : 7;
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

}  // namespace te
