// softmax_bwd (X4). What the causal rule and the window have hidden is neither read nor computed.
#pragma once

#include "../library/softmax_request.h"
#include "resident.muh"
#include "row_shape.muh"
#include "visible_keys.muh"

namespace te {

template <class Reader>
struct SoftmaxBackward {
    Reader grad;
    Reader output;
    int64_t rows;  // of all batches
    int64_t queries;
    int64_t keys;
    float scale;
    VisibleBand band;
    typename Reader::OwnWriter grad_input;
    uint32_t half;  // 16 (ReaderBFloat16::values_again)
};

template <class Shape, class Reader>
TE_DEVICE void softmax_gradient_of_row(const SoftmaxBackward<Reader>& softmax, int64_t row, const ColumnRange& range,
                                       RowReducer<Shape>& reducer) {
    const int64_t start = row * softmax.keys;
    RowOperand<Shape, Reader> grad, output;
    output.load(softmax.output, start, softmax.keys, range);
    grad.load(softmax.grad, start, softmax.keys, range);
    FourSums projections;
    float g[8], y[8];
    each_octet<Shape>(softmax.keys, [&](int k, auto key, auto left) {
        if (!Shape::kHolds && !range.meets(key)) return;
        grad.values(softmax.grad, k, key, left, g);
        output.values(softmax.output, k, key, left, y);
        hide_outside(y, range, key, 0.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) projections.add_product(i, y[i] == 0.0f ? 0.0f : g[i], y[i]);
    });
    const float projection = reducer.sum(projections.total());
    each_octet<Shape>(softmax.keys, [&](int k, auto key, auto left) {
        if (!Shape::kHolds && !range.meets(key)) return;
        grad.values_again(softmax.grad, k, key, left, softmax.half, g);
        output.values_again(softmax.output, k, key, left, softmax.half, y);
        hide_outside(y, range, key, 0.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float gradient = (g[i] - projection) * y[i] * softmax.scale;
            g[i] = y[i] == 0.0f ? 0.0f : gradient;
        }
        softmax.grad_input.write(start + key, g, left);
    });
    write_zeros_around<Shape>(softmax.grad_input, start, softmax.keys, range);
}

// One row for each group or block, as softmax_rows.
template <class Shape, class Reader>
TE_KERNEL_RESIDENT(2)
softmax_gradients(SoftmaxBackward<Reader> softmax) {
    TE_SHARED(RowPartials, partials);
    RowReducer<Shape> reducer(partials);
    const int64_t row = first_row<Shape>();
    if (row < softmax.rows) {  // the same for all threads of a row
        const ColumnRange range = softmax.band.of_query(row % softmax.queries, softmax.keys);
        with_fitting_shape<Shape>(
            range, [&](auto shape) { softmax_gradient_of_row<decltype(shape)>(softmax, row, range, reducer); });
    }
}

inline int32_t softmax_bwd(uintptr_t grad_output, int32_t grad_dtype, uintptr_t output, int32_t output_dtype,
                           int64_t batches, int64_t queries, int64_t keys, double scale, int32_t causal,
                           int64_t window_left, int64_t window_right, uintptr_t grad_input, uintptr_t stream) {
    const BandRequest band = {queries, keys, causal, window_left, window_right};
    const int64_t rows = elements_of(batches, queries), elements = elements_of(rows, keys);
    Arguments arguments("softmax_bwd");
    arguments.plain_dtype("grad_dtype", grad_dtype).plain_dtype("output_dtype", output_dtype).size("batches", batches);
    check_band(arguments, band, batches);
    const int32_t status = arguments.not_nan("scale", scale)
                               .reads("grad_output", grad_output, elements, bytes_of_dtype(grad_dtype))
                               .reads("output", output, elements, bytes_of_dtype(output_dtype))
                               .writes("grad_input", grad_input, elements, bytes_of_dtype(grad_dtype))
                               .status();
    if (status != TE_HAL_OK || elements == 0) return status;
    const Access access =
        AccessFinder(keys).reads(grad_output, grad_dtype).reads(output, output_dtype).writes(grad_input).found();
    return with_rows(access, keys, [&](auto shape, auto reader) {
        using Shape = decltype(shape);
        using Reader = decltype(reader);
        const SoftmaxBackward<Reader> softmax = {make_reader<Reader>(grad_output, grad_dtype, keys),
                                                 make_reader<Reader>(output, output_dtype, keys),
                                                 rows,
                                                 queries,
                                                 keys,
                                                 static_cast<float>(scale),
                                                 visible_band(band),
                                                 make_writer<typename Reader::OwnWriter>(grad_input, grad_dtype, keys),
                                                 16u};
        return launch(ceil_divide(rows, Shape::kRowsOfBlock), stream, &softmax_gradients<Shape, Reader>, softmax);
    });
}

}  // namespace te
