// norm_bwd (N4) for rows of more than 8192 columns, whose sums do not fit into registers: grad_input row by row, and
// the gradients of gamma and beta as column sums by a second kernel. norm_summed_rows.muh has the shorter ones.
#pragma once

#include "column_sums.muh"
#include "norm_summed_rows.muh"

namespace te {

// n = (x - mean) * rstd and the gradient of a row's eight results.
template <bool kCentered, class Shape, class Reader>
TE_DEVICE void load_gradients(const RowOperand<Shape, Reader>& input, const RowOperand<Shape, Reader>& grad,
                              const NormBackward<Reader>& norm, const RowStatistics& statistics, int k, int64_t col,
                              int64_t left, float (&n)[8], float (&g)[8]) {
    input.values(norm.input, k, col, left, n);
    grad.values(norm.grad, k, col, left, g);
    center(n, statistics.mean, kCentered);
#pragma unroll
    for (int i = 0; i < 8; ++i) n[i] = n[i] * statistics.rstd;
}

// grad_input = rstd * (grad * gamma - (mean of that) - n * (mean of that times n)).
template <bool kCentered, class Shape, class Reader>
TE_DEVICE void row_gradient(const RowOperand<Shape, Reader>& input, const RowOperand<Shape, Reader>& grad,
                            const NormBackward<Reader>& norm, int64_t row, const RowStatistics& statistics,
                            RowReducer<Shape>& reducer) {
    FourSums sums, projections;
    float n[8], g[8], gamma[8];
    each_existing_octet<Shape>(norm.cols, [&](int k, int64_t col, int64_t left) {
        load_gradients<kCentered>(input, grad, norm, statistics, k, col, left, n, g);
        load_gamma(norm.weights, col, left, gamma);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float weighted = g[i] * gamma[i];
            if (kCentered) sums.add(i, weighted);
            projections.add_product(i, weighted, n[i]);
        }
    });
    float of_row[2] = {projections.total(), sums.total()};
    reducer.sums(of_row);
    const float projection = of_row[0] * norm.share, sum = of_row[1] * norm.share;
    each_existing_octet<Shape>(norm.cols, [&](int k, int64_t col, int64_t left) {
        load_gradients<kCentered>(input, grad, norm, statistics, k, col, left, n, g);
        load_gamma(norm.weights, col, left, gamma);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float away = kCentered ? multiply_add(n[i], projection, sum) : n[i] * projection;
            g[i] = (g[i] * gamma[i] - away) * statistics.rstd;
        }
        norm.grad_input.write(row * norm.cols + col, g, left);
    });
}

// grad_input alone.
template <class Shape, class Reader, bool kCentered>
TE_KERNEL norm_input_gradients(NormBackward<Reader> norm) {
    TE_SHARED(RowPartials, sums);
    RowReducer<Shape> reducer(sums);
    for (int64_t row = first_row<Shape>(); row < norm.rows; row += row_step<Shape>()) {
        RowOperand<Shape, Reader> input, grad;
        input.load(norm.input, row * norm.cols, norm.cols);
        grad.load(norm.grad, row * norm.cols, norm.cols);
        row_gradient<kCentered>(input, grad, norm, row, load_statistics<kCentered>(norm, row), reducer);
    }
}

// The sums for gamma and beta alone: a row of partial sums from each row of tiles.
template <class Reader, bool kCentered>
TE_KERNEL norm_weight_gradients(NormBackward<Reader> norm) {
    TE_SHARED(TileSums, shared);
    const Place place(block_index(), norm.rows, norm.cols);
    float grad_gamma[8] = {}, grad_beta[8] = {};
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        const int64_t row = place.row + k;
        const int64_t left = place.template count<false>(k);
        float n[8], g[8];
        norm.input.values(norm.input.load(row * norm.cols + place.col, left), n);
        norm.grad.values(norm.grad.load(row * norm.cols + place.col, left), g);
        if (left > 0) {
            center(n, kCentered ? norm.mean[row] : 0.0f, kCentered);
            const float rstd = norm.rstd[row];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                grad_gamma[i] = multiply_add(g[i], n[i] * rstd, grad_gamma[i]);
                if (kCentered) grad_beta[i] = grad_beta[i] + g[i];
            }
        }
    }
    float* const into = norm.partials + place.first_row() / kTile * norm.cols * (kCentered ? 2 : 1) + place.first_col();
    leave_tile_sums(shared, place, grad_gamma, into);
    if (kCentered) leave_tile_sums(shared, place, grad_beta, into + norm.cols);
}

}  // namespace te
