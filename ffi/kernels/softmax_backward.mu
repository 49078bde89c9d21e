// softmax_bwd (X4). What the causal rule and the window have hidden is neither read nor computed.
#pragma once

#include "../library/softmax_request.h"
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
    PlainWriter grad_input;
};

// visit(key, left, g, y) for every octet of which the range holds a part; 0 for both where y is 0 or out of range.
template <class Shape, class Reader, class Visit>
TE_DEVICE void each_gradient(const RowOperand<Shape, Reader>& grad, const RowOperand<Shape, Reader>& output,
                             const SoftmaxBackward<Reader>& softmax, const KeyRange& range, const Visit& visit) {
    each_octet<Shape>(softmax.keys, [&](int k, int64_t key, int64_t left) {
        if (key + 8 <= range.begin || key >= range.end) return;
        float g[8], y[8];
        grad.values(softmax.grad, k, key, left, g);
        output.values(softmax.output, k, key, left, y);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (y[i] == 0.0f) g[i] = 0.0f;
        }
        visit(key, left, g, y);
    });
}

template <class Shape, class Reader>
TE_DEVICE void softmax_gradient_of_row(const SoftmaxBackward<Reader>& softmax, int64_t row,
                                       RowReducer<Shape>& reducer) {
    const KeyRange range = softmax.band.of_query(row % softmax.queries, softmax.keys);
    const int64_t start = row * softmax.keys;
    RowOperand<Shape, Reader> grad, output;
    output.load(softmax.output, start, softmax.keys, range.begin, range.end);
    grad.load(softmax.grad, start, softmax.keys, range.begin, range.end);
    float projection = 0.0f;
    each_gradient<Shape>(grad, output, softmax, range, [&](int64_t, int64_t, const float(&g)[8], const float(&y)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) projection = projection + g[i] * y[i];
    });
    projection = reducer.sum(projection);
    each_gradient<Shape>(grad, output, softmax, range,
                         [&](int64_t key, int64_t left, float(&g)[8], const float(&y)[8]) {
#pragma unroll
                             for (int i = 0; i < 8; ++i) {
                                 g[i] = y[i] == 0.0f ? 0.0f : (g[i] - projection) * y[i] * softmax.scale;
                             }
                             softmax.grad_input.write(start + key, g, left);
                         });
    write_zeros<Shape>(softmax.grad_input, start, softmax.keys, range);
}

// One row for each group or block, as softmax_rows.
template <class Shape, class Reader>
TE_KERNEL softmax_gradients(SoftmaxBackward<Reader> softmax) {
    TE_SHARED(RowPartials, partials);
    RowReducer<Shape> reducer(partials);
    const int64_t row = first_row<Shape>();
    if (row < softmax.rows) softmax_gradient_of_row<Shape>(softmax, row, reducer);  // the same for a row's threads
}

inline int32_t softmax_bwd(uintptr_t grad_output, int32_t grad_dtype, uintptr_t output, int32_t output_dtype,
                           int64_t batches, int64_t queries, int64_t keys, double scale, int32_t causal,
                           int64_t window_left, int64_t window_right, uintptr_t grad_input, uintptr_t stream) {
    const BandRequest band = {queries, keys, causal, window_left, window_right};
    const int64_t rows = elements_of(batches, queries), elements = elements_of(rows, keys);
    Arguments arguments("softmax_bwd");
    arguments.plain_dtype("grad_dtype", grad_dtype).plain_dtype("output_dtype", output_dtype).size("batches", batches);
    check_band(arguments, band, batches);
    const int32_t status = arguments.number("scale", scale, -HUGE_VAL)
                               .reads("grad_output", grad_output, elements, bytes_of_dtype(grad_dtype))
                               .reads("output", output, elements, bytes_of_dtype(output_dtype))
                               .writes("grad_input", grad_input, elements, bytes_of_dtype(grad_dtype))
                               .status();
    if (status != TE_HAL_OK || elements == 0) return status;
    const bool is_bfloat16 = fits_bfloat16(grad_output, grad_dtype, keys) && fits_bfloat16(output, output_dtype, keys);
    return with_reader(is_bfloat16, [&](auto reader) {
        using Reader = decltype(reader);
        const SoftmaxBackward<Reader> softmax = {make_reader<Reader>(grad_output, grad_dtype, keys),
                                                 make_reader<Reader>(output, output_dtype, keys),
                                                 rows,
                                                 queries,
                                                 keys,
                                                 static_cast<float>(scale),
                                                 visible_band(band),
                                                 plain_writer(grad_input, grad_dtype, keys)};
        return with_row_shape(keys, [&](auto shape) {
            using Shape = decltype(shape);
            return launch(ceil_divide(rows, Shape::kRowsOfBlock), stream, &softmax_gradients<Shape, Reader>, softmax);
        });
    });
}

}  // namespace te
