// softmax_fwd (X1-X3): maximum, sum and quotient, three passes over a row that is in registers where it fits. Keys that
// the causal rule or the window hides are not read.
#pragma once

#include "../library/softmax_request.h"
#include "resident.muh"
#include "row_shape.muh"
#include "visible_keys.muh"

namespace te {

template <class Reader>
struct SoftmaxForward {
    Reader input;
    int64_t rows;  // of all batches
    int64_t queries;
    int64_t keys;
    float scale;
    VisibleBand band;
    KeyMask mask;
    typename Reader::Writer output;
};

// What one query sees.
struct QueryView {
    int64_t start;  // of its row
    ColumnRange range;
    const uint8_t* mask;  // NULL: none

    template <class Reader>
    TE_DEVICE QueryView(const SoftmaxForward<Reader>& softmax, int64_t row)
        : start(row * softmax.keys),
          range(softmax.band.of_query(row % softmax.queries, softmax.keys)),
          mask(softmax.mask.of_row(row, softmax.queries)) {}
};

// The scores of one query: in registers, without a mask, or found again in every pass. Hidden ones are -infinity.
template <class Shape, class Reader>
class QueryScores {
  public:
    TE_DEVICE QueryScores(const SoftmaxForward<Reader>& softmax, const QueryView& query) {
        input_.load(softmax.input, query.start, softmax.keys, query.range);
    }

    // visit(key, left, scores) for every octet, but for those in memory that lie outside the range. The first pass
    // finds the scores; what a pass writes to them is what the next one sees if they are in registers.
    template <bool kIsFirst, class Visit>
    TE_DEVICE void each(const SoftmaxForward<Reader>& softmax, const QueryView& query, const Visit& visit) {
        each_octet<Shape>(softmax.keys, [&](int k, auto key, auto left) {
            if (!Shape::kHolds && !query.range.meets(key)) return;
            float(&scores)[8] = held_[k];
            if (kIsFirst || !Shape::kHolds) find(softmax, query, k, key, left, scores);
            visit(key, left, scores);
        });
    }

  private:
    template <class Index>
    TE_DEVICE void find(const SoftmaxForward<Reader>& softmax, const QueryView& query, int k, Index key, Index left,
                        float (&scores)[8]) const {
        input_.values(softmax.input, k, key, left, scores);
#pragma unroll
        for (int i = 0; i < 8; ++i) scores[i] = scores[i] * softmax.scale;
        hide_outside(scores, query.range, key, float_of(kMinusInfinityBits));
        if (Shape::kHolds || query.mask == nullptr) return;
        hide_masked(scores, query.mask, softmax.mask.key_stride, key, left);
    }

    RowOperand<Shape, Reader> input_;
    float held_[Shape::kHolds ? Shape::kOctets : 1][8];
};

// e^(score - largest)
TE_DEVICE float weight_of(float score, float largest) {
    return power_of_2((score - largest) * kLog2E);
}

// NaN for all that is visible: a NaN or an infinity is among it (X3).
template <class Shape, class Reader>
TE_DEVICE void write_undefined(const SoftmaxForward<Reader>& softmax, const QueryView& query) {
    using InMemory = RowShape<Shape::kLanes, 0>;
    const float zeros[8] = {};
    each_octet<InMemory>(softmax.keys, [&](int, int64_t key, int64_t left) {
        if (!query.range.meets(key)) softmax.output.write(query.start + key, zeros, left);
    });
    QueryScores<InMemory, Reader> again(softmax, query);
    again.template each<true>(softmax, query, [&](int64_t key, int64_t left, float(&scores)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            scores[i] = bits_of(scores[i]) == kMinusInfinityBits ? 0.0f : float_of(kQuietNanBits);
        }
        softmax.output.write(query.start + key, scores, left);
    });
}

template <class Shape, class Reader>
TE_DEVICE void softmax_of_row(const SoftmaxForward<Reader>& softmax, const QueryView& query,
                              RowReducer<Shape>& reducer) {
    QueryScores<Shape, Reader> scores_of(softmax, query);
    float largest_of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) largest_of[i] = float_of(kMinusInfinityBits);
    scores_of.template each<true>(softmax, query, [&](int64_t, int64_t, const float(&scores)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest_of[i % 4] = larger_value(largest_of[i % 4], scores[i]);
    });
    float largest = reducer.max(
        larger_value(larger_value(largest_of[0], largest_of[1]), larger_value(largest_of[2], largest_of[3])));
    // With nothing to see, any finite number will do: all weights are 0.
    if (bits_of(largest) == kMinusInfinityBits) largest = 0.0f;
    FourSums weights;
    scores_of.template each<false>(softmax, query, [&](int64_t, int64_t, float(&scores)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            scores[i] = weight_of(scores[i], largest);
            weights.add(i, scores[i]);
        }
    });
    const float sum = reducer.sum(weights.total());
    const float share = sum == 0.0f ? 0.0f : divide(1.0f, sum);
    scores_of.template each<false>(softmax, query, [&](int64_t key, int64_t left, float(&scores)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            scores[i] = (Shape::kHolds ? scores[i] : weight_of(scores[i], largest)) * share;
        }
        softmax.output.write(query.start + key, scores, left);
    });
    write_zeros_around<Shape>(softmax.output, query.start, softmax.keys, query.range);
    if (is_nan_bits(bits_of(sum))) write_undefined<Shape>(softmax, query);
}

// One row for each group or block, and no loop over rows: compilers would move what depends on columns alone out of it,
// into registers that are not there.
template <class Shape, class Reader>
TE_KERNEL_RESIDENT(2)
softmax_rows(SoftmaxForward<Reader> softmax) {
    TE_SHARED(RowPartials, partials);
    RowReducer<Shape> reducer(partials);
    const int64_t row = first_row<Shape>();
    if (row < softmax.rows) {  // the same for all threads of a row
        const QueryView query(softmax, row);
        with_fitting_shape<Shape>(query.range, [&](auto shape) {
            using Fitting = decltype(shape);
            softmax_of_row<Fitting>(softmax, query, reducer);
        });
    }
}

inline int32_t softmax_fwd(uintptr_t input, int32_t input_dtype, int64_t outer, int64_t inner, int64_t queries,
                           int64_t keys, double scale, uintptr_t mask, int64_t mask_outer_stride,
                           int64_t mask_inner_stride, int64_t mask_query_stride, int64_t mask_key_stride,
                           int32_t causal, int64_t window_left, int64_t window_right, uintptr_t output,
                           int32_t output_dtype, uintptr_t stream) {
    const BandRequest band = {queries, keys, causal, window_left, window_right};
    const MaskRequest masked = {
        mask, outer, inner, queries, keys, mask_outer_stride, mask_inner_stride, mask_query_stride, mask_key_stride};
    const int64_t batches = elements_of(outer, inner), rows = elements_of(batches, queries);
    Arguments arguments("softmax_fwd");
    arguments.plain_dtype("input_dtype", input_dtype)
        .plain_dtype("output_dtype", output_dtype)
        .size("outer", outer)
        .size("inner", inner)
        .product("outer * inner", outer, inner);
    check_band(arguments, band, batches);
    check_mask(arguments, masked);
    const int32_t status = arguments.not_nan("scale", scale)
                               .reads("input", input, elements_of(rows, keys), bytes_of_dtype(input_dtype))
                               .writes("output", output, elements_of(rows, keys), bytes_of_dtype(output_dtype))
                               .status();
    if (status != TE_HAL_OK || elements_of(rows, keys) == 0) return status;
    // A mask is for rows that stay in memory.
    const Access access =
        mask != 0 ? Access::kAny : AccessFinder(keys).reads(input, input_dtype).writes(output).found();
    return with_rows(access, keys, [&](auto shape, auto reader) {
        using Shape = decltype(shape);
        using Reader = decltype(reader);
        const SoftmaxForward<Reader> softmax = {make_reader<Reader>(input, input_dtype, keys),
                                                rows,
                                                queries,
                                                keys,
                                                static_cast<float>(scale),
                                                visible_band(band),
                                                key_mask(masked),
                                                make_writer<typename Reader::Writer>(output, output_dtype, keys)};
        return launch(ceil_divide(rows, Shape::kRowsOfBlock), stream, &softmax_rows<Shape, Reader>, softmax);
    });
}

}  // namespace te
