// amax and compute_scale (A1, S1-S4).
#pragma once

#include "../library/arguments.h"
#include "../library/cast_launches.h"
#include "../library/element_dispatch.h"
#include "../library/launch.h"
#include "absmax.muh"
#include "reduce.muh"
#include "scale_rule.muh"

namespace te {

struct AmaxShared {
    Partials partials;
};

// *amax = found, or the larger of the two where it accumulates.
TE_DEVICE void leave_amax(uint32_t found, float* amax, bool accumulate) {
    if (accumulate && covers(bits_of(*amax), found)) return;
    *amax = float_of(found);
}

// Every block's maximum into `partials`, unless there is one block and `amax` is given: then it writes that.
template <class T, bool kAligned>
TE_KERNEL amax_of_elements(const typename T::Storage* __restrict__ input, int64_t count,
                           uint32_t* __restrict__ partials, float* amax, bool accumulate) {
    TE_SHARED(AmaxShared, shared);
    constexpr int kInFlight = 8 / sizeof(typename T::Storage);
    const int64_t octets = (count + 7) / 8;
    const int64_t step = block_count() * kThreads * kInFlight;
    uint32_t largest = 0;
    for (int64_t first = block_index() * kThreads * kInFlight + thread_index(); first < octets; first += step) {
        Octet<T> loaded[kInFlight];
        load_octets<T, kAligned>(loaded, input, count, first);
        largest = larger(largest, octets_absmax(loaded));
    }
    largest = block_max(largest, shared.partials);
    if (thread_index() != 0) return;
    if (block_count() == 1 && amax != nullptr) {
        leave_amax(largest, amax, accumulate);
    } else {
        partials[block_index()] = largest;
    }
}

TE_KERNEL amax_of_partials(const uint32_t* __restrict__ partials, int64_t count, float* amax, bool accumulate) {
    TE_SHARED(AmaxShared, shared);
    const uint32_t largest = reduce_partials(partials, count, shared.partials);
    if (thread_index() == 0) leave_amax(largest, amax, accumulate);
}

TE_KERNEL scales_of_amaxes(const uint32_t* amaxes, float* scales, float* scale_invs, int64_t count, ScaleRule rule) {
    for (int64_t i = block_index() * kThreads + thread_index(); i < count; i += block_count() * kThreads) {
        const float scale = scale_from_amax(amaxes[i], rule);
        scales[i] = scale;
        if (scale_invs != nullptr) scale_invs[i] = reciprocal(scale);
    }
}

int32_t launch_amax_of_elements(uintptr_t input, int32_t dtype, int64_t count, uintptr_t partials, uintptr_t amax,
                                bool accumulate, uintptr_t stream) {
    return with_plain_type(dtype, [&](auto type) {
        using T = decltype(type);
        return with_bool(is_aligned(input, 16), [&](auto aligned) {
            return launch(amax_blocks(dtype, count), stream, &amax_of_elements<T, decltype(aligned)::value>,
                          pointer<const typename T::Storage>(input), count, pointer<uint32_t>(partials),
                          pointer<float>(amax), accumulate);
        });
    });
}

inline int32_t amax(uintptr_t input, int32_t input_dtype, int64_t count, uintptr_t amax, uint32_t flags,
                    uintptr_t workspace, int64_t workspace_size, uintptr_t stream) {
    const int32_t status = Arguments("amax")
                               .plain_dtype("input_dtype", input_dtype)
                               .size("count", count)
                               .product("count", count, 1)
                               .flags(flags, TE_HAL_FLAG_ACCUMULATE)
                               .reads("input", input, count, bytes_of_dtype(input_dtype))
                               .writes("amax", amax, 1, 4)
                               .workspace(workspace, workspace_size, amax_workspace_bytes())
                               .status();
    if (status != TE_HAL_OK) return status;
    const bool accumulate = (flags & TE_HAL_FLAG_ACCUMULATE) != 0;
    const int32_t first = launch_amax_of_elements(input, input_dtype, count, workspace, amax, accumulate, stream);
    const int64_t blocks = amax_blocks(input_dtype, count);
    if (first != TE_HAL_OK || blocks == 1) return first;
    return launch(1, stream, &amax_of_partials, pointer<const uint32_t>(workspace), blocks, pointer<float>(amax),
                  accumulate);
}

inline int32_t compute_scale(uintptr_t amax, uintptr_t scale, uintptr_t scale_inv, int64_t count, double fp8_max,
                             double epsilon, double value_for_inf, uint32_t flags, uintptr_t stream) {
    Arguments arguments("compute_scale");
    arguments.size("count", count)
        .product("count", count, 1)
        .above_zero("fp8_max", fp8_max)
        .at_least_zero("epsilon", epsilon)
        .above_zero("value_for_inf", value_for_inf)
        .flags(flags, TE_HAL_FLAG_POWER_OF_2)
        .writes("scale", scale, count, 4)
        .writes_optional("scale_inv", scale_inv, count, 4);
    if (amax != scale) arguments.reads("amax", amax, count, 4);
    const int32_t status = arguments.status();
    if (status != TE_HAL_OK || count == 0) return status;
    const ScaleRule rule = {static_cast<float>(fp8_max), static_cast<float>(epsilon), static_cast<float>(value_for_inf),
                            (flags & TE_HAL_FLAG_POWER_OF_2) != 0};
    return launch(smaller_of(ceil_divide(count, kThreads), 1024), stream, &scales_of_amaxes,
                  pointer<const uint32_t>(amax), pointer<float>(scale), pointer<float>(scale_inv), count, rule);
}

}  // namespace te
