// What other families call of the cast family. The definitions, with their kernels, are in units/cast.mu alone.
#pragma once

#include "../kernels/patch.muh"
#include "cast_request.h"
#include "element_dispatch.h"

namespace te {

inline int64_t tiles_of(int64_t rows, int64_t cols) {
    return ceil_divide(rows, kTile) * ceil_divide(cols, kTile);
}

// Blocks that amax_of_elements runs on, and leaves a partial maximum of each.
inline int64_t amax_blocks(int32_t dtype, int64_t count) {
    const int64_t elements_of_block = kThreads * 8 * (8 / bytes_of_dtype(dtype));
    const int64_t blocks = ceil_divide(count, elements_of_block);
    return blocks < 1 ? 1 : smaller_of(blocks, kMaxPartials);
}

inline int64_t amax_workspace_bytes() {
    return kMaxPartials * 4;
}

// First half of an amax: amax_blocks() partial maxima, or with one block, unless `amax` is 0, the amax itself.
int32_t launch_amax_of_elements(uintptr_t input, int32_t dtype, int64_t count, uintptr_t partials, uintptr_t amax,
                                bool accumulate, uintptr_t stream);

// Cast input[rows, cols] as `request` says. With mode TENSOR_CURRENT `partials` holds the maxima to take the scale
// from.
int32_t launch_cast(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, const CastRequest& request,
                    uintptr_t partials, int64_t partial_count, uintptr_t stream);

// Decode a copy with per-tensor scaling; blocks have kernels of their own.
int32_t launch_decode(uintptr_t data, int32_t data_dtype, int64_t rows, int64_t cols, int32_t copy, uintptr_t scale_inv,
                      uintptr_t output, int32_t output_dtype, uintptr_t stream);

// output[cols, rows] = input[rows, cols], of single bytes. The end of an input that was just written is still in the
// cache, so that blocks had better begin there.
int32_t launch_transpose_bytes(uintptr_t input, uintptr_t output, int64_t rows, int64_t cols, bool was_just_written,
                               uintptr_t stream);

}  // namespace te
