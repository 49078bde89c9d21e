// The arguments that every entry with a per-tensor cast has in common: checked, and turned into what kernels take.
#pragma once

#include "../kernels/cast_parts.muh"
#include "arguments.h"
#include "device.h"
#include "launch.h"

namespace te {

// As the entries have them (quantize and quantize_current in te_hal.h).
struct CastRequest {
    int32_t mode;  // TE_HAL_MODE_TENSOR or TE_HAL_MODE_TENSOR_CURRENT
    uintptr_t scale;
    uintptr_t amax;
    double epsilon;
    uint32_t flags;
    uintptr_t rowwise_data;
    uintptr_t columnwise_data;
    int32_t columnwise_order;
    uintptr_t rowwise_scale_inv;
    uintptr_t columnwise_scale_inv;
    int32_t output_dtype;
};

// [rows, cols] is the shape of what is cast. Flags beyond TE_HAL_FLAG_POWER_OF_2 are the entry's to check.
inline void check_cast(Arguments& arguments, const CastRequest& request, int64_t rows, int64_t cols) {
    const bool current = request.mode == TE_HAL_MODE_TENSOR_CURRENT;
    const int64_t elements = elements_of(rows, cols);
    arguments.code("mode", request.mode, TE_HAL_MODE_TENSOR, TE_HAL_MODE_TENSOR_CURRENT)
        .fp8_dtype("output_dtype", request.output_dtype)
        .code("columnwise_order", request.columnwise_order, TE_HAL_ORDER_TRANSPOSED, TE_HAL_ORDER_SAME)
        .at_least_zero("epsilon", request.epsilon)
        .require(current || (request.epsilon == 0.0 && (request.flags & TE_HAL_FLAG_POWER_OF_2) == 0),
                 "epsilon and POWER_OF_2 go with mode TENSOR_CURRENT; the scale of TENSOR is given")
        .require(elements == 0 || request.rowwise_data != 0 || request.columnwise_data != 0,
                 "rowwise_data and columnwise_data are both null; accepted: one or both")
        .writes_optional("rowwise_data", request.rowwise_data, elements, 1)
        .writes_optional("columnwise_data", request.columnwise_data, elements, 1)
        .writes_optional("rowwise_scale_inv", request.rowwise_scale_inv, 1, 4)
        .writes_optional("amax", request.amax, 1, 4);
    if (request.columnwise_scale_inv != request.rowwise_scale_inv) {
        arguments.writes_optional("columnwise_scale_inv", request.columnwise_scale_inv, 1, 4);
    }
    if (current) {
        arguments.writes_optional("scale", request.scale, 1, 4);
    } else {
        arguments.reads("scale", request.scale, 1, 4);
    }
}

// Where the scale comes from; with mode TENSOR_CURRENT `partials` holds `partial_count` maxima.
inline CastScale cast_scale(const CastRequest& request, uintptr_t partials, int64_t partial_count) {
    CastScale source = {};
    if (request.mode == TE_HAL_MODE_TENSOR) {
        source.given = pointer<const float>(request.scale);
        return source;
    }
    source.partials = pointer<const uint32_t>(partials);
    source.partial_count = partial_count;
    source.rule = {request.output_dtype == TE_HAL_FLOAT8_E4M3 ? E4M3::kMax : E5M2::kMax,
                   static_cast<float>(request.epsilon), kLargestFloat, (request.flags & TE_HAL_FLAG_POWER_OF_2) != 0};
    return source;
}

inline CastTarget cast_target(const CastRequest& request) {
    return {pointer<uint8_t>(request.rowwise_data),
            pointer<uint8_t>(request.columnwise_data),
            pointer<float>(request.rowwise_scale_inv),
            pointer<float>(request.columnwise_scale_inv),
            pointer<float>(request.amax),
            request.mode == TE_HAL_MODE_TENSOR_CURRENT ? pointer<float>(request.scale) : nullptr,
            encoder_choice()};
}

inline bool wants_transposed(const CastRequest& request) {
    return request.columnwise_data != 0 && request.columnwise_order == TE_HAL_ORDER_TRANSPOSED;
}

}  // namespace te
