// update_delayed_scale(s): the amax histories of any number of tensors roll, and their scales are renewed (D1-D4).
#pragma once

#include "../library/arguments.h"
#include "../library/group_memory.h"
#include "../library/launch.h"
#include "reduce.muh"
#include "scale_rule.muh"

namespace te {

// One history, [length, count], and what belongs to it.
struct DelayedGroup {
    float* history;
    float* scale;
    const float* reduced_amax;  // may be NULL
    int64_t length;
    int64_t count;
    float scaled_max;  // fp8_max / 2^margin
};

// As many as one launch takes: kernel arguments stay below the 4 KB of both runtimes.
constexpr int kMostGroups = 64;

struct DelayedGroups {
    DelayedGroup groups[kMostGroups];
    int used;
};

struct DelayedShared {
    Partials partials;
};

// Signed integers order like the floats that they encode, but for negative ones, which no amax is; these are offset so
// that the order is that of unsigned ones.
TE_DEVICE uint32_t as_ordered(uint32_t bits) {
    return (is_nan_bits(bits) ? 0u : bits) ^ kSignBit;
}
TE_DEVICE uint32_t from_ordered(uint32_t ordered) {
    return ordered ^ kSignBit;
}
TE_DEVICE bool is_zero_bits(uint32_t bits) {
    return (bits & kAllButSign) == 0;
}

// Rolls column `column` up by one row, 256 rows at a time, and returns the window's maximum.
TE_DEVICE uint32_t roll_column(const DelayedGroup& group, int64_t column, uint32_t newest, Partials& partials) {
    uint32_t largest = 0;
    for (int64_t first = 0; first < group.length; first += kThreads) {
        const int64_t row = first + thread_index();
        uint32_t above = 0;
        if (row < group.length) {
            above = row + 1 < group.length ? bits_of(group.history[(row + 1) * group.count + column]) : newest;
            largest = larger(largest, as_ordered(above));
        }
        TE_SYNC();  // a row is overwritten after all have read theirs, row 0 included
        if (row < group.length) group.history[row * group.count + column] = row == 0 ? 0.0f : float_of(above);
    }
    return from_ordered(block_max(largest, partials));
}

TE_DEVICE void renew_scale(const DelayedGroup& group, int64_t column, uint32_t amax) {
    if (is_zero_bits(amax) || (amax & kAllButSign) >= kInfinityBits) return;
    const float scale = divide(group.scaled_max, float_of(amax));
    group.scale[column] = bits_of(scale) == kInfinityBits ? kLargestFloat : scale;
}

// A block takes one column of one group.
TE_KERNEL update_delayed_columns(DelayedGroups all, bool most_recent) {
    TE_SHARED(DelayedShared, shared);
    int64_t column = block_index();
    int which = 0;
    while (column >= all.groups[which].count) column -= all.groups[which++].count;
    const DelayedGroup group = all.groups[which];
    uint32_t newest = bits_of(group.history[column]);
    if (group.reduced_amax != nullptr && !is_zero_bits(bits_of(group.reduced_amax[column]))) {
        newest = bits_of(group.reduced_amax[column]);
    }
    if (!is_zero_bits(newest)) {  // the same for the whole block
        const uint32_t largest = roll_column(group, column, newest, shared.partials);
        if (thread_index() == 0) renew_scale(group, column, most_recent ? newest : largest);
    }
}

// fp8_max * 2^-margin, held to the range of fp32 (D3).
inline float scaled_maximum(double fp8_max, int32_t margin) {
    const double scaled = ldexp(fp8_max, -margin);
    return static_cast<float>(scaled < static_cast<double>(kLargestFloat) ? scaled
                                                                          : static_cast<double>(kLargestFloat));
}

// Beyond, fp8_max / 2^margin leaves the normal range of fp32.
constexpr int32_t kLargestMargin = 100;

inline void check_rule(Arguments& arguments, int32_t margin, int32_t algo) {
    arguments.between("margin", margin, -kLargestMargin, kLargestMargin)
        .code("algo", algo, TE_HAL_AMAX_MAX, TE_HAL_AMAX_MOST_RECENT);
}

inline void check_delayed_group(Arguments& arguments, uintptr_t history, uintptr_t scale, uintptr_t reduced_amax,
                                int64_t length, int64_t count, double fp8_max) {
    arguments.at_least("length", length, 1)
        .size("count", count)
        .product("length * count", length, count)
        .above_zero("fp8_max", fp8_max)
        .writes("amax_history", history, elements_of(length, count), 4)
        .writes("scale", scale, count, 4);
    if (reduced_amax != history) arguments.reads_optional("reduced_amax", reduced_amax, count, 4);
}

// Launch over groups [0, used), if they have a column at all.
inline int32_t launch_delayed_groups(const DelayedGroups& all, bool most_recent, uintptr_t stream) {
    int64_t columns = 0;
    for (int i = 0; i < all.used; ++i) columns += all.groups[i].count;
    if (columns == 0) return TE_HAL_OK;
    return launch(columns, stream, &update_delayed_columns, all, most_recent);
}

inline int32_t update_delayed_scales(int32_t groups, const uintptr_t* amax_histories, const uintptr_t* scales,
                                     const uintptr_t* reduced_amaxes, const int64_t* lengths, const int64_t* counts,
                                     const double* fp8_maxima, int32_t margin, int32_t algo, uintptr_t stream) {
    Arguments arrays("update_delayed_scales");
    const bool given = amax_histories != nullptr && scales != nullptr && lengths != nullptr && counts != nullptr &&
                       fp8_maxima != nullptr;
    check_rule(arrays, margin, algo);
    int32_t status = arrays.size("groups", groups)
                         .require(groups == 0 || given, "an array is null; only reduced_amaxes may be")
                         .status();
    const auto reduced = [&](int i) { return reduced_amaxes == nullptr ? 0 : reduced_amaxes[i]; };
    for (int i = 0; i < groups && status == TE_HAL_OK; ++i) {
        Arguments arguments("update_delayed_scales");
        check_delayed_group(arguments, amax_histories[i], scales[i], reduced(i), lengths[i], counts[i], fp8_maxima[i]);
        status = arguments.status();
    }
    if (status == TE_HAL_OK && groups > 1) {
        GroupMemory memory(groups);
        for (int i = 0; i < groups; ++i) {
            memory.writes("amax_history", i, amax_histories[i], elements_of(lengths[i], counts[i]) * 4);
            memory.writes("scale", i, scales[i], counts[i] * 4);
            if (reduced(i) != 0 && reduced(i) != amax_histories[i]) {
                memory.reads("reduced_amax", i, reduced(i), counts[i] * 4);
            }
        }
        status = memory.status();
    }
    for (int first = 0; first < groups && status == TE_HAL_OK; first += kMostGroups) {
        DelayedGroups all = {};
        for (int i = first; i < groups && all.used < kMostGroups; ++i) {
            all.groups[all.used++] = {pointer<float>(amax_histories[i]),
                                      pointer<float>(scales[i]),
                                      pointer<const float>(reduced(i)),
                                      lengths[i],
                                      counts[i],
                                      scaled_maximum(fp8_maxima[i], margin)};
        }
        status = launch_delayed_groups(all, algo == TE_HAL_AMAX_MOST_RECENT, stream);
    }
    return status;
}

inline int32_t update_delayed_scale(uintptr_t amax_history, uintptr_t scale, uintptr_t reduced_amax, int64_t length,
                                    int64_t count, double fp8_max, int32_t margin, int32_t algo, uintptr_t stream) {
    Arguments arguments("update_delayed_scale");
    check_delayed_group(arguments, amax_history, scale, reduced_amax, length, count, fp8_max);
    check_rule(arguments, margin, algo);
    const int32_t status = arguments.status();
    if (status != TE_HAL_OK || count == 0) return status;
    DelayedGroups all = {};
    all.groups[0] = {
        pointer<float>(amax_history),   pointer<float>(scale), pointer<const float>(reduced_amax), length, count,
        scaled_maximum(fp8_max, margin)};
    all.used = 1;
    return launch_delayed_groups(all, algo == TE_HAL_AMAX_MOST_RECENT, stream);
}

}  // namespace te
