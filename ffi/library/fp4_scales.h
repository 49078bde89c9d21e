// The scale_inv of an NVFP4 copy, as entries take it: E4M3 bytes of blocks with padding, then the amax (NV1).
#pragma once

#include "arguments.h"
#include "block_scales.h"
#include "launch.h"

namespace te {

constexpr int64_t kFp4BlockLength = 16;
constexpr int64_t kLineMultiple = 128;
constexpr int64_t kPitchMultiple = 4;

inline int64_t rounded_up(int64_t size, int64_t multiple) {
    return ceil_divide(size, multiple) * multiple;
}

// Of a copy with `lines` lines of `length` elements: bytes from a line's scales to the next line's, and the bytes
// before the amax.
struct Fp4ScaleLayout {
    int64_t pitch;
    int64_t amax_offset;

    Fp4ScaleLayout(int64_t lines, int64_t length)
        : pitch(rounded_up(length / kFp4BlockLength, kPitchMultiple)),
          amax_offset(elements_of(rounded_up(lines, kLineMultiple), pitch)) {}

    // So that the address must be one that the amax can lie behind.
    int64_t words() const { return amax_offset / 4 + 1; }
};

inline void check_fp4_sizes(Arguments& arguments, int64_t rows, int64_t cols) {
    arguments.size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        // With the padding of the scales; 2^53 lines are more than any memory has.
        .product("rows * 128", rows, kLineMultiple)
        .product("cols * 128", cols, kLineMultiple)
        .require(is_multiple(rows, kFp4BlockLength) && is_multiple(cols, kFp4BlockLength),
                 "rows and cols are no multiples of 16, which NVFP4's blocks need");
}

}  // namespace te
