// softmax_fwd (X1-X3): maximum, sum and quotient, three passes over a row that is in registers where it fits. Keys that
// the causal rule or the window hides are not read.
#pragma once

#include "../library/softmax_request.h"
#include "exponential.muh"
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
    PlainWriter output;
};

// The scores of one query, in registers or computed again in every pass.
template <class Shape, class Reader>
class QueryScores {
  public:
    TE_DEVICE QueryScores(const SoftmaxForward<Reader>& softmax, int64_t row) {
        const int64_t query = row % softmax.queries;
        range = softmax.band.of_query(query, softmax.keys);
        mask_ = softmax.mask.of_query(row / softmax.queries, query);
        input_.load(softmax.input, row * softmax.keys, softmax.keys, range.begin, range.end);
        if constexpr (Shape::kHolds) {
            each_visible(softmax, [&](int k, int64_t key, int64_t left) { find(softmax, k, key, left, held_[k]); });
            if (mask_ == nullptr) return;
            each_visible(softmax, [&](int k, int64_t key, int64_t left) {
                hide_masked(held_[k], mask_, softmax.mask.key_stride, key, left);
            });
        }
    }

    // visit(key, left, scores) for every octet of which the range holds a part. What it writes to the scores is what
    // the next pass sees if they are in registers.
    template <class Visit>
    TE_DEVICE void each(const SoftmaxForward<Reader>& softmax, const Visit& visit) {
        each_visible(softmax, [&](int k, int64_t key, int64_t left) {
            if constexpr (Shape::kHolds) {
                visit(key, left, held_[k]);
            } else {
                float scores[8];
                find(softmax, k, key, left, scores);
                if (mask_ != nullptr) hide_masked(scores, mask_, softmax.mask.key_stride, key, left);
                visit(key, left, scores);
            }
        });
    }

    KeyRange range;

  private:
    template <class Visit>
    TE_DEVICE void each_visible(const SoftmaxForward<Reader>& softmax, const Visit& visit) const {
        each_octet<Shape>(softmax.keys, [&](int k, int64_t key, int64_t left) {
            if (key + 8 > range.begin && key < range.end) visit(k, key, left);
        });
    }
    TE_DEVICE void find(const SoftmaxForward<Reader>& softmax, int k, int64_t key, int64_t left,
                        float (&scores)[8]) const {
        input_.values(softmax.input, k, key, left, scores);
#pragma unroll
        for (int i = 0; i < 8; ++i) scores[i] = scores[i] * softmax.scale;
        hide_outside(scores, range, key);
    }

    RowOperand<Shape, Reader> input_;
    float held_[Shape::kHolds ? Shape::kOctets : 1][8];
    const uint8_t* mask_;
};

// e^(score - largest); -0 for a hidden key, which is neutral in sums and told from a visible one that is too small.
TE_DEVICE float weight_of(float score, float largest) {
    const float weight = power_of_2((score - largest) * kLog2E);
    return bits_of(score) == kMinusInfinityBits ? float_of(kSignBit) : weight;
}

template <class Shape, class Reader>
TE_DEVICE void softmax_of_row(const SoftmaxForward<Reader>& softmax, int64_t row, RowReducer<Shape>& reducer) {
    QueryScores<Shape, Reader> query(softmax, row);
    float largest = float_of(kMinusInfinityBits);
    query.each(softmax, [&](int64_t, int64_t, const float(&scores)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = scores[i] > largest ? scores[i] : largest;
    });
    largest = reducer.max(largest);
    // With nothing to see, any finite number will do: all weights are 0.
    if (bits_of(largest) == kMinusInfinityBits) largest = 0.0f;
    float sum = 0.0f;
    query.each(softmax, [&](int64_t, int64_t, float(&scores)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            scores[i] = weight_of(scores[i], largest);
            sum = sum + scores[i];
        }
    });
    sum = reducer.sum(sum);
    const float share = sum == 0.0f ? 0.0f : divide(1.0f, sum);
    query.each(softmax, [&](int64_t key, int64_t left, float(&scores)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float weight = Shape::kHolds ? scores[i] : weight_of(scores[i], largest);
            scores[i] = bits_of(weight) == kSignBit ? 0.0f : weight * share;
        }
        softmax.output.write(row * softmax.keys + key, scores, left);
    });
    write_zeros<Shape>(softmax.output, row * softmax.keys, softmax.keys, query.range);
}

// One row for each group or block, and no loop over rows: compilers would move what depends on columns alone out of it,
// into registers that are not there.
template <class Shape, class Reader>
TE_KERNEL softmax_rows(SoftmaxForward<Reader> softmax) {
    TE_SHARED(RowPartials, partials);
    RowReducer<Shape> reducer(partials);
    const int64_t row = first_row<Shape>();
    if (row < softmax.rows) softmax_of_row<Shape>(softmax, row, reducer);  // the same for all threads of a row
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
    const int32_t status = arguments.number("scale", scale, -HUGE_VAL)
                               .reads("input", input, elements_of(rows, keys), bytes_of_dtype(input_dtype))
                               .writes("output", output, elements_of(rows, keys), bytes_of_dtype(output_dtype))
                               .status();
    if (status != TE_HAL_OK || elements_of(rows, keys) == 0) return status;
    return with_reader(fits_bfloat16(input, input_dtype, keys), [&](auto reader) {
        using Reader = decltype(reader);
        const SoftmaxForward<Reader> softmax = {make_reader<Reader>(input, input_dtype, keys),
                                                rows,
                                                queries,
                                                keys,
                                                static_cast<float>(scale),
                                                visible_band(band),
                                                key_mask(masked),
                                                plain_writer(output, output_dtype, keys)};
        return with_row_shape(keys, [&](auto shape) {
            using Shape = decltype(shape);
            return launch(ceil_divide(rows, Shape::kRowsOfBlock), stream, &softmax_rows<Shape, Reader>, softmax);
        });
    });
}

}  // namespace te
