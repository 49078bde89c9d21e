// norm_quantize (F1): a norm and the cast of its result.
//
// With a given scale one pass over rows makes codes, and a transposed copy is made from these; it costs less than to
// read the input twice. A scale that is found takes a first pass for statistics and amax, and a second one that forms
// the same results again from the statistics and casts them; nothing in between is written.
#pragma once

#include "../library/fused_request.h"
#include "norm.mu"

namespace te {

// Results of a norm whose statistics are known.
template <class Reader_>
struct NormResults {
    using Reader = Reader_;
    static constexpr int kHalves = 1;
    static constexpr bool kIsSummed = false;
    struct Raw {
        typename Reader::Raw input;
        RowStatistics statistics;
    };

    Reader input;
    NormWeights<Reader> weights;
    const float* mean;  // NULL for RMSNorm
    const float* rstd;
    int64_t cols;

    TE_DEVICE Raw load(int64_t row, int64_t col, int64_t left) const {
        Raw raw;
        raw.input = input.load(row * cols + col, left);
        raw.statistics.mean = left > 0 && weights.has_bias ? mean[row] : 0.0f;
        // Of a row that is none NaN comes, which the amax leaves out; by 0 it would be beta.
        raw.statistics.rstd = left > 0 ? rstd[row] : float_of(kQuietNanBits);
        return raw;
    }
};

template <class Reader>
struct ColumnState<NormResults<Reader>> {
    float gamma[8];
    float beta[8];

    TE_DEVICE ColumnState(const NormResults<Reader>& source, int64_t col, int64_t left) {
        load_weights(source.weights, col, left, gamma, beta);
    }
    TE_DEVICE void results(const NormResults<Reader>& source, const typename NormResults<Reader>::Raw& raw,
                           float (&results)[1][8]) const {
        source.input.values(raw.input, results[0]);
        normalise(results[0], raw.statistics, gamma, beta, source.weights.has_bias);
    }
};

// A norm's result and where it goes before the cast.
struct PlainResult {
    uintptr_t address;  // 0: nowhere
    int32_t dtype;      // what results are rounded to, also if they go nowhere
};

inline int32_t launch_norm_last_pass(const NormRequest& norm, const CastRequest& cast, const LastPass& pass,
                                     uintptr_t stream) {
    return with_reader(norm_access(norm).found(), [&](auto reader) {
        using Reader = decltype(reader);
        const NormResults<Reader> source = {make_reader<Reader>(norm.input, norm.input_dtype, norm.cols),
                                            norm_weights<Reader>(norm), pointer<const float>(norm.mean),
                                            pointer<const float>(norm.rstd), norm.cols};
        return launch_last_pass(source, cast, pass, stream);
    });
}

// Codes in the order of the rows alone.
inline int32_t norm_then_cast_rows(const NormRequest& norm, const CastRequest& cast, CastTarget target,
                                   PlainResult plain, Access access, uintptr_t stream) {
    const CastScale scale = cast_scale(cast, 0, 0);
    int64_t blocks = row_blocks(norm.rows, norm.cols, kMaxBlocks);
    if (access == Access::kBFloat16 && plain.address == 0 && is_lean_sink(target, cast.output_dtype)) {
        return launch_norm<true>(
            norm, access,
            [&](auto) {
                return LeanCastSink<E4M3>{scale, target};
            },
            blocks, stream);
    }
    const auto make_sink = [&](auto reader) {
        using Writer = typename decltype(reader)::Writer;
        return CastSink<Writer>{make_writer<Writer>(plain.address, plain.dtype, norm.cols), scale, target,
                                cast.output_dtype};
    };
    return launch_norm<true>(norm, access, make_sink, blocks, stream);
}

// The scale is given: codes leave the pass over rows, and become columns afterwards.
inline int32_t norm_then_cast(const NormRequest& norm, const CastRequest& cast, PlainResult plain, uintptr_t stream) {
    const bool transposed = wants_transposed(cast);
    CastTarget target = cast_target(cast);
    if (transposed) target.columnwise = nullptr;
    const Access access = norm_access(norm)
                              .writes(plain.address)
                              .writes(cast.rowwise_data, 8)
                              .writes(transposed ? 0 : cast.columnwise_data, 8)
                              .found();
    const int32_t status = norm_then_cast_rows(norm, cast, target, plain, access, stream);
    if (status != TE_HAL_OK || !transposed) return status;
    return launch_transpose_bytes(cast.rowwise_data, cast.columnwise_data, norm.rows, norm.cols, true, stream);
}

// A pass for statistics and the plain result; unless `partials` is 0, also for the maxima of each block. `blocks`: at
// most so many; receives how many there are.
inline int32_t launch_norm_first_pass(const NormRequest& norm, PlainResult plain, uintptr_t partials, int64_t& blocks,
                                      uintptr_t stream) {
    const Access access = norm_access(norm).writes(plain.address).found();
    const auto make_sink = [&](auto reader) {
        using Writer = typename decltype(reader)::Writer;
        return PlainSink<Writer>{make_writer<Writer>(plain.address, plain.dtype, norm.cols), plain.dtype,
                                 pointer<uint32_t>(partials)};
    };
    return launch_norm<true>(norm, access, make_sink, blocks, stream);
}

// Statistics first, and with TENSOR_CURRENT the amax of the rounded results; then results again, and their cast.
inline int32_t norm_twice_and_cast(const NormRequest& norm, const CastRequest& cast, PlainResult plain,
                                   uintptr_t workspace, uintptr_t stream) {
    const bool current = cast.mode == TE_HAL_MODE_TENSOR_CURRENT;
    int64_t blocks = row_blocks(norm.rows, norm.cols, current ? kMaxPartials : kMaxBlocks);
    const int32_t status = launch_norm_first_pass(norm, plain, current ? workspace : 0, blocks, stream);
    if (status != TE_HAL_OK) return status;
    return launch_norm_last_pass(norm, cast, {norm.rows, norm.cols, plain.dtype, workspace, blocks, 0}, stream);
}

// Without elements: the scale, and the statistics of rows without columns.
inline int32_t norm_nothing(const NormRequest& norm, const CastRequest& cast, uintptr_t workspace, uintptr_t stream) {
    const int32_t status = cast_nothing(cast, workspace, stream);
    if (status != TE_HAL_OK || norm.rows == 0) return status;
    int64_t blocks = row_blocks(norm.rows, norm.cols, kMaxBlocks);
    return launch_norm_first_pass(norm, {0, TE_HAL_NO_DTYPE}, 0, blocks, stream);
}

inline int32_t norm_quantize(int32_t norm, uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols,
                             uintptr_t weight, int32_t weight_dtype, uintptr_t bias, int32_t bias_dtype, double epsilon,
                             uint32_t flags, uintptr_t mean, uintptr_t rstd, uintptr_t plain, int32_t rounded_dtype,
                             int32_t mode, uintptr_t scale, uintptr_t amax, double scale_epsilon,
                             uintptr_t rowwise_data, uintptr_t columnwise_data, int32_t columnwise_order,
                             uintptr_t rowwise_scale_inv, uintptr_t columnwise_scale_inv, int32_t output_dtype,
                             uintptr_t workspace, int64_t workspace_size, uintptr_t stream) {
    const NormRequest of_norm = {norm, input,      input_dtype, rows,  cols, weight, weight_dtype,
                                 bias, bias_dtype, epsilon,     flags, mean, rstd};
    const CastRequest of_cast = {mode,
                                 scale,
                                 amax,
                                 scale_epsilon,
                                 flags,
                                 rowwise_data,
                                 columnwise_data,
                                 columnwise_order,
                                 rowwise_scale_inv,
                                 columnwise_scale_inv,
                                 output_dtype};
    const bool current = mode == TE_HAL_MODE_TENSOR_CURRENT;
    Arguments arguments("norm_quantize");
    check_norm(arguments, of_norm);
    check_cast(arguments, of_cast, rows, cols);
    check_rounded_dtype(arguments, of_cast, rounded_dtype);
    if (plain != 0) {
        arguments.plain_dtype("rounded_dtype", rounded_dtype)
            .writes("plain", plain, elements_of(rows, cols), bytes_of_dtype(rounded_dtype));
    }
    const int32_t status = arguments.flags(flags, TE_HAL_FLAG_ZERO_CENTERED_GAMMA | TE_HAL_FLAG_POWER_OF_2)
                               .workspace(workspace, workspace_size, fused_workspace_bytes(mode, rows, 0))
                               .status();
    if (status != TE_HAL_OK) return status;
    const PlainResult kept = {plain, rounded_dtype};
    if (rows * cols == 0) return norm_nothing(of_norm, of_cast, workspace, stream);
    if (current || (rowwise_data == 0 && wants_transposed(of_cast))) {
        return norm_twice_and_cast(of_norm, of_cast, kept, workspace, stream);
    }
    return norm_then_cast(of_norm, of_cast, kept, stream);
}

}  // namespace te
