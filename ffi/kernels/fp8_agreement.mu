// Does the device's FP8 instruction give what the software encoder gives? Counted on the device.
#pragma once

#include "fp8.muh"
#include "reduce.muh"

namespace te {

struct AgreementShared {
    Partials partials;
};

// The pattern of number `i`: all of them in turn, or every upper half with lower halves around rounding boundaries.
constexpr int64_t kAllPatterns = int64_t{1} << 32;
constexpr int64_t kBoundaryPatterns = 6 << 16;

TE_DEVICE uint32_t fp8_pattern(int64_t i, bool all) {
    if (all) return static_cast<uint32_t>(i);
    const uint32_t lower = static_cast<uint32_t>(i >> 16);
    const uint32_t around = lower == 0   ? 0x0000u
                            : lower == 1 ? 0x0001u
                            : lower == 2 ? 0x7fffu
                            : lower == 3 ? 0x8000u
                            : lower == 4 ? 0x8001u
                                         : 0xffffu;
    return (static_cast<uint32_t>(i & 0xffff) << 16) | around;
}

template <class F>
TE_DEVICE uint32_t disagreements(const float (&values)[8]) {
    const Vector8 expected = encode_octet<F>(values, EncoderChoice{false});
    const Vector8 found = encode_octet<F>(values, EncoderChoice{true});
    uint32_t different = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) different += code_of(expected, i) != code_of(found, i) ? 1u : 0u;
    return different;
}

constexpr int64_t kAgreementBlocks = 1024;

// Per block, the largest count among its threads: 0 everywhere exactly if the two agree.
TE_KERNEL count_fp8_disagreements(uint32_t* worst_of_block, bool all) {
    TE_SHARED(AgreementShared, shared);
    const int64_t count = all ? kAllPatterns : kBoundaryPatterns;
    uint32_t different = 0;
    for (int64_t i = (block_index() * kThreads + thread_index()) * 8; i < count; i += block_count() * kThreads * 8) {
        float values[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) values[k] = float_of(fp8_pattern(i + k, all));
        different += disagreements<E4M3>(values) + disagreements<E5M2>(values);
    }
    different = block_max(different, shared.partials);
    if (thread_index() == 0) worst_of_block[block_index()] = different;
}

}  // namespace te
