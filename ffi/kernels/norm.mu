// norm_fwd, and the pass over rows that norm_quantize shares with it (N1-N3).
#pragma once

#include "../library/multiprocessors.h"
#include "../library/norm_request.h"
#include "norm_held_rows.muh"
#include "result_sinks.muh"

namespace te {

// Rows of any type, anywhere, of any length.
template <class Shape, class Reader, class Sink>
TE_KERNEL_RESIDENT(2)
normalise_rows(NormForward<Reader> norm, Sink sink) {
    TE_SHARED(NormShared, shared);
    RowReducer<Shape> reducer(shared.sums);
    const NormWeights<Reader>& weights = norm.weights;
    const bool centered = weights.has_bias;
    auto state = sink.begin(shared.sink);
    for (int64_t row = first_row<Shape>(); row < norm.rows; row += row_step<Shape>()) {
        RowOperand<Shape, Reader> input;
        input.load(norm.input, row * norm.cols, norm.cols);
        const RowStatistics statistics =
            row_statistics<Shape>(input, norm.input, norm.cols, norm.share, centered, norm.epsilon, reducer);
        if (row_lane<Shape>() == 0) {
            if (centered) norm.mean[row] = statistics.mean;
            norm.rstd[row] = statistics.rstd;
        }
        each_octet<Shape>(norm.cols, [&](int k, int64_t col, int64_t left) {
            float values[8], gamma[8], beta[8];
            load_weights(weights, col, left, gamma, beta);
            input.values(norm.input, k, col, left, values);
            normalise(values, statistics, gamma, beta, centered);
            sink.take(state, row * norm.cols + col, values, left);
        });
    }
    sink.end(state, shared.sink);
}

template <class Reader>
NormForward<Reader> norm_forward(const NormRequest& request) {
    return {make_reader<Reader>(request.input, request.input_dtype, request.cols),
            norm_weights<Reader>(request),
            request.rows,
            request.cols,
            share_of_column(request.cols),
            static_cast<float>(request.epsilon),
            pointer<float>(request.mean),
            pointer<float>(request.rstd)};
}

// Blocks of a pass over rows: at most `most`. Each takes several rows then.
inline int64_t row_blocks(int64_t rows, int64_t cols, int64_t most) {
    return smaller_of(ceil_divide(rows, kThreads / lanes_of_row(cols)), most);
}

template <class Shape, bool kAhead, class Sink>
int32_t launch_held_rows(const NormRequest& request, const Sink& sink, int64_t& blocks, uintptr_t stream) {
    if (kAhead) blocks = smaller_of(blocks, kResidentHeld<Shape, kAhead> * multiprocessors());
    return with_bool(is_layernorm(request), [&](auto centered) {
        return launch(blocks, stream, &normalise_held_rows<Shape, decltype(centered)::value, kAhead, Sink>,
                      norm_forward<ReaderBFloat16>(request), sink);
    });
}

// make_sink(reader) is where results go. `blocks`: at most so many; receives how many there are.
template <bool kAhead, class MakeSink>
int32_t launch_norm(const NormRequest& request, Access access, const MakeSink& make_sink, int64_t& blocks,
                    uintptr_t stream) {
    return with_rows(access, request.cols, [&](auto shape, auto reader) {
        using Shape = decltype(shape);
        using Reader = decltype(reader);
        const auto sink = make_sink(reader);
        if constexpr (Reader::kIsCheap) {
            return launch_held_rows<Shape, kAhead>(request, sink, blocks, stream);
        } else {
            return launch(blocks, stream, &normalise_rows<Shape, Reader, decltype(make_sink(reader))>,
                          norm_forward<Reader>(request), sink);
        }
    });
}

inline int32_t norm_fwd(int32_t norm, uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols,
                        uintptr_t weight, int32_t weight_dtype, uintptr_t bias, int32_t bias_dtype, double epsilon,
                        uint32_t flags, uintptr_t output, int32_t output_dtype, uintptr_t mean, uintptr_t rstd,
                        uintptr_t stream) {
    const NormRequest request = {norm, input,      input_dtype, rows,  cols, weight, weight_dtype,
                                 bias, bias_dtype, epsilon,     flags, mean, rstd};
    Arguments arguments("norm_fwd");
    check_norm(arguments, request);
    const int32_t status = arguments.flags(flags, TE_HAL_FLAG_ZERO_CENTERED_GAMMA)
                               .plain_dtype("output_dtype", output_dtype)
                               .writes("output", output, elements_of(rows, cols), bytes_of_dtype(output_dtype))
                               .status();
    if (status != TE_HAL_OK || rows == 0) return status;
    const Access access = norm_access(request).writes(output).found();
    const auto make_sink = [&](auto reader) {
        using Writer = typename decltype(reader)::Writer;
        return PlainSink<Writer>{make_writer<Writer>(output, output_dtype, cols), TE_HAL_NO_DTYPE, nullptr};
    };
    int64_t blocks = row_blocks(rows, cols, kMaxBlocks);
    return launch_norm<false>(request, access, make_sink, blocks, stream);
}

}  // namespace te
