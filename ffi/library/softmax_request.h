// The arguments about what a query sees: checked, and turned into what kernels take.
#pragma once

#include "../kernels/visible_keys.muh"
#include "arguments.h"
#include "reader_dispatch.h"

namespace te {

struct BandRequest {
    int64_t queries;
    int64_t keys;
    int32_t causal;
    int64_t window_left;
    int64_t window_right;
};

inline void check_band(Arguments& arguments, const BandRequest& request, int64_t batches) {
    const int64_t rows = elements_of(batches, request.queries);
    arguments.size("queries", request.queries)
        .size("keys", request.keys)
        .product("batches * queries", batches, request.queries)
        .product("batches * queries * keys", rows, request.keys)
        .code("causal", request.causal, TE_HAL_CAUSAL_NONE, TE_HAL_CAUSAL_BOTTOM_RIGHT)
        .at_least("window_left", request.window_left, -1)
        .at_least("window_right", request.window_right, -1);
}

// With a causal rule the right end is the diagonal, whatever the window says. Windows wider than the matrix are all the
// same, and cut so that no sum overflows.
inline VisibleBand visible_band(const BandRequest& request) {
    const int64_t widest = request.queries + request.keys;
    VisibleBand band;
    band.offset = request.causal == TE_HAL_CAUSAL_BOTTOM_RIGHT ? request.keys - request.queries : 0;
    band.left = smaller_of(request.window_left, widest);
    band.right = request.causal == TE_HAL_CAUSAL_NONE ? smaller_of(request.window_right, widest) : 0;
    return band;
}

struct MaskRequest {
    uintptr_t bytes;
    int64_t outer;
    int64_t inner;
    int64_t queries;
    int64_t keys;
    int64_t outer_stride;
    int64_t inner_stride;
    int64_t query_stride;
    int64_t key_stride;
};

inline void check_mask(Arguments& arguments, const MaskRequest& request) {
    if (request.bytes == 0) {
        const bool has_strides = request.outer_stride != 0 || request.inner_stride != 0 || request.query_stride != 0 ||
                                 request.key_stride != 0;
        arguments.require(!has_strides, "mask is null; accepted with strides 0 only");
        return;
    }
    const int64_t sizes[4] = {request.outer, request.inner, request.queries, request.keys};
    const int64_t strides[4] = {request.outer_stride, request.inner_stride, request.query_stride, request.key_stride};
    int64_t extent = 1;
    bool empty = false;
    for (int i = 0; i < 4; ++i) {
        arguments.size("a mask's stride", strides[i]).product("size * stride of the mask", sizes[i], strides[i]);
        empty = empty || sizes[i] == 0;
        extent += sizes[i] > 0 ? elements_of(sizes[i] - 1, strides[i]) : 0;
    }
    arguments.reads("mask", request.bytes, empty ? 0 : extent, 1);
}

inline KeyMask key_mask(const MaskRequest& request) {
    return {pointer<const uint8_t>(request.bytes),
            request.inner,
            request.outer_stride,
            request.inner_stride,
            request.query_stride,
            request.key_stride};
}

}  // namespace te
