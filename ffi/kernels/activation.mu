// activation_fwd and activation_bwd (V1-V3), and the pass over all elements that fused kernels share with them.
#pragma once

#include "../library/activation_request.h"
#include "activation_sources.muh"
#include "result_sinks.muh"

namespace te {

// Octets are numbered along the rows. A thread takes every kThreads-th of a block's chunk; the host has divided, so
// that its way from one to the next needs no division.
struct OctetWalk {
    int64_t rows;
    int64_t cols;
    int64_t octets_of_row;
    int64_t step_rows;  // kThreads octets on: so many rows
    int64_t step_cols;  // and columns
};

struct OctetPosition {
    int64_t row;
    int64_t col;

    // One row needs no division, which in 64 bits costs as much as the results of five elements.
    TE_DEVICE OctetPosition(int64_t octet, const OctetWalk& walk) {
        row = walk.rows == 1 ? 0 : octet / walk.octets_of_row;
        col = (octet - row * walk.octets_of_row) * 8;
    }
    TE_DEVICE void advance(const OctetWalk& walk) {
        row += walk.step_rows;
        col += walk.step_cols;
        if (col >= walk.octets_of_row * 8) {
            col -= walk.octets_of_row * 8;
            row += 1;
        }
    }
    // Elements from here to the end of the row; 0 beyond the last row.
    TE_DEVICE int64_t left(const OctetWalk& walk) const { return row < walk.rows ? walk.cols - col : 0; }
};

struct ActivationShared {
    Partials sink;
};

// The results of `source`, all octets, to `sink`.
template <class Source, class Sink>
TE_KERNEL activate_elements(Source source, OctetWalk walk, Sink sink) {
    TE_SHARED(ActivationShared, shared);
    constexpr int kInFlight = Source::kInFlight;
    const int64_t octets = walk.rows * walk.octets_of_row;
    auto state = sink.begin(shared.sink);
    for (int64_t first = block_index() * kThreads * kInFlight; first < octets;
         first += block_count() * kThreads * kInFlight) {
        typename Source::Raw raws[kInFlight];
        OctetPosition loaded(first + thread_index(), walk);
        OctetPosition used = loaded;
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            raws[k] = source.load(loaded.row, loaded.col, loaded.left(walk));
            loaded.advance(walk);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            float results[Source::kHalves][8];
            source.results(raws[k], results);
            const int64_t left = used.left(walk);
            if (left > 0) {
#pragma unroll
                for (int half = 0; half < Source::kHalves; ++half) {
                    const int64_t index = (used.row * Source::kHalves + half) * walk.cols + used.col;
                    sink.take(state, index, results[half], left);
                }
            }
            used.advance(walk);
        }
    }
    sink.end(state, shared.sink);
}

inline OctetWalk octet_walk(int64_t rows, int64_t cols) {
    const int64_t octets_of_row = ceil_divide(cols, 8);
    return {rows, cols, octets_of_row, kThreads / octets_of_row, kThreads % octets_of_row * 8};
}

// Launch over [rows, cols] results (of each half); at most `most` blocks, each leaving a partial maximum if `sink`
// wants.
template <class Source, class Sink>
int32_t launch_activation(const Source& source, const OctetWalk& walk, const Sink& sink, int64_t most,
                          uintptr_t stream) {
    const int64_t blocks = ceil_divide(walk.rows * walk.octets_of_row, kThreads * Source::kInFlight);
    return launch(smaller_of(blocks, most), stream, &activate_elements<Source, Sink>, source, walk, sink);
}

// The sink that writes a source's results to a plain tensor.
template <class Source>
auto plain_sink(const Source& source, uintptr_t output, int32_t dtype) {
    using Writer = typename Source::Reader::Writer;
    return PlainSink<Writer>{make_writer<Writer>(output, dtype, source.cols), TE_HAL_NO_DTYPE, nullptr};
}

inline int32_t activation_fwd(int32_t activation, uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols,
                              double limit, double alpha, double offset, uintptr_t output, int32_t output_dtype,
                              uintptr_t stream) {
    const ActivationRequest request = {activation, 0,    TE_HAL_NO_DTYPE, input, input_dtype,
                                       rows,       cols, limit,           alpha, offset};
    Arguments arguments("activation_fwd");
    check_activation(arguments, request);
    const int32_t status = arguments.plain_dtype("output_dtype", output_dtype)
                               .writes("output", output, elements_of(rows, cols), bytes_of_dtype(output_dtype))
                               .status();
    if (status != TE_HAL_OK || elements_of(rows, cols) == 0) return status;
    const OctetWalk walk = octet_walk(is_gated(activation) ? rows : 1, walked_cols(request));
    return with_forward_source(request, walk.cols, output, [&](const auto& source) {
        return launch_activation(source, walk, plain_sink(source, output, output_dtype), kMaxBlocks, stream);
    });
}

inline int32_t activation_bwd(int32_t activation, uintptr_t grad_output, int32_t grad_dtype, uintptr_t input,
                              int32_t input_dtype, int64_t rows, int64_t cols, double limit, double alpha,
                              double offset, uintptr_t grad_input, int32_t grad_input_dtype, uintptr_t stream) {
    const ActivationRequest request = {activation, grad_output, grad_dtype, input, input_dtype,
                                       rows,       cols,        limit,      alpha, offset};
    Arguments arguments("activation_bwd");
    check_activation(arguments, request);
    const int32_t status =
        arguments.plain_dtype("grad_input_dtype", grad_input_dtype)
            .writes("grad_input", grad_input, input_elements(request), bytes_of_dtype(grad_input_dtype))
            .status();
    if (status != TE_HAL_OK || elements_of(rows, cols) == 0) return status;
    const OctetWalk walk = octet_walk(is_gated(activation) ? rows : 1, walked_cols(request));
    return with_backward_source(request, walk.cols, grad_input, [&](const auto& source) {
        return launch_activation(source, walk, plain_sink(source, grad_input, grad_input_dtype), kMaxBlocks, stream);
    });
}

}  // namespace te
