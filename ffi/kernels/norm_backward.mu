// norm_bwd (N4): grad_input row by row; the gradients of gamma and beta as column sums.
//
// Rows of up to 8192 columns are read once: a fixed number of blocks goes through all rows and each thread keeps the
// sums of its own columns in registers. For longer rows these do not fit, and a second kernel forms the sums.
#pragma once

#include "column_sums.muh"
#include "norm_rule.muh"
#include "resident.muh"

namespace te {

template <class Reader>
struct NormBackward {
    Reader grad;
    Reader input;
    NormWeights<Reader> weights;
    const float* mean;  // NULL for RMSNorm
    const float* rstd;
    int64_t rows;
    int64_t cols;
    float share;  // of a column in a mean: 1 / cols
    typename Reader::Writer grad_input;
    float* partials;  // a row a block: sums of grad_gamma, then of grad_beta
};

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

// Mean and rstd of a row; of none where there is no such row.
template <bool kCentered, class Reader>
TE_DEVICE RowStatistics load_statistics(const NormBackward<Reader>& norm, int64_t row) {
    if (row >= norm.rows) return {0.0f, 0.0f};
    return {kCentered ? norm.mean[row] : 0.0f, norm.rstd[row]};
}

// grad_input = rstd * (grad * gamma - (mean of that) - n * (mean of that times n)). visit(k, n, grad) sees each octet
// once; used(k, col, left) is called when an octet is no longer needed.
template <bool kCentered, class Shape, class Reader, class Visit, class Used>
TE_DEVICE void row_gradient(const RowOperand<Shape, Reader>& input, const RowOperand<Shape, Reader>& grad,
                            const NormBackward<Reader>& norm, int64_t row, const RowStatistics& statistics,
                            RowReducer<Shape>& reducer, const Visit& visit, const Used& used) {
    FourSums sums, projections;
    float n[8], g[8], gamma[8];
    each_existing_octet<Shape>(norm.cols, [&](int k, int64_t col, int64_t left) {
        load_gradients<kCentered>(input, grad, norm, statistics, k, col, left, n, g);
        load_gamma(norm.weights, col, left, gamma);
        visit(k, n, g);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float weighted = g[i] * gamma[i];
            if (kCentered) sums.add(i, weighted);
            projections.add_product(i, weighted, n[i]);
        }
    });
    float sum = sums.total(), projection = projections.total();
    if (kCentered) {
        reducer.sums(sum, projection);
    } else {
        projection = reducer.sum(projection);
    }
    sum = sum * norm.share;
    projection = projection * norm.share;
    each_existing_octet<Shape>(norm.cols, [&](int k, int64_t col, int64_t left) {
        load_gradients<kCentered>(input, grad, norm, statistics, k, col, left, n, g);
        load_gamma(norm.weights, col, left, gamma);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float away = kCentered ? multiply_add(n[i], projection, sum) : n[i] * projection;
            g[i] = (g[i] * gamma[i] - away) * statistics.rstd;
        }
        norm.grad_input.write(row * norm.cols + col, g, left);
        used(k, col, left);
    });
}

struct NormBackwardShared {
    RowPartials sums;
    float of_groups[kGroups][256];
};

// Add up what the block's groups hold for the same columns, and write the block's row of partial sums.
template <class Shape>
TE_DEVICE void leave_row_sums(const float (&held)[Shape::kOctets][8], int64_t cols, NormBackwardShared& shared,
                              float* into) {
    if constexpr (Shape::kLanes == kThreads) {
        each_existing_octet<Shape>(cols, [&](int k, int64_t col, int64_t left) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i < left) into[col + i] = held[k][i];
            }
        });
    } else {
#pragma unroll
        for (int k = 0; k < Shape::kOctets; ++k) {
            TE_SYNC();
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                shared.of_groups[thread_index() / 32][row_lane<Shape>() * 8 + i] = held[k][i];
            }
            TE_SYNC();
            float sum = shared.of_groups[0][thread_index()];
#pragma unroll
            for (int group = 1; group < kGroups; ++group) sum = sum + shared.of_groups[group][thread_index()];
            const int64_t col = k * 256 + thread_index();
            if (col < cols) into[col] = sum;
        }
    }
}

// Blocks that a multiprocessor shall hold, so that there are enough loads in flight.
template <class Shape>
constexpr int kResident = Shape::kOctets >= 4 ? 2 : 5 - Shape::kOctets;

template <class Shape, class Reader, bool kCentered>
TE_KERNEL_RESIDENT(kResident<Shape>)
norm_gradients(NormBackward<Reader> norm) {
    TE_SHARED(NormBackwardShared, shared);
    RowReducer<Shape> reducer(shared.sums);
    float grad_gamma[Shape::kOctets][8], grad_beta[Shape::kOctets][8];
#pragma unroll
    for (int k = 0; k < Shape::kOctets; ++k) {
#pragma unroll
        for (int i = 0; i < 8; ++i) grad_gamma[k][i] = grad_beta[k][i] = 0.0f;
    }
    const auto add = [&](int k, const float(&n)[8], const float(&g)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            grad_gamma[k][i] = multiply_add(g[i], n[i], grad_gamma[k][i]);
            if (kCentered) grad_beta[k][i] = grad_beta[k][i] + g[i];
        }
    };
    RowOperand<Shape, Reader> input, grad;
    int64_t row = first_row<Shape>();
    input.load(norm.input, row * norm.cols, row < norm.rows ? norm.cols : 0);
    grad.load(norm.grad, row * norm.cols, row < norm.rows ? norm.cols : 0);
    RowStatistics statistics = load_statistics<kCentered>(norm, row);
    for (; row < norm.rows; row += row_step<Shape>()) {
        // The next row is on its way while this one's results are still being formed.
        const int64_t next = row + row_step<Shape>();
        RowStatistics coming = {0.0f, 0.0f};
        row_gradient<kCentered>(input, grad, norm, row, statistics, reducer, add,
                                [&](int k, int64_t col, int64_t left) {
                                    const int64_t count = next < norm.rows ? left : 0;
                                    if (k == 0) coming = load_statistics<kCentered>(norm, next);
                                    input.reload(norm.input, k, next * norm.cols + col, count);
                                    grad.reload(norm.grad, k, next * norm.cols + col, count);
                                });
        statistics = coming;
    }
    float* const into = norm.partials + block_index() * norm.cols * (kCentered ? 2 : 1);
    leave_row_sums<Shape>(grad_gamma, norm.cols, shared, into);
    if (kCentered) leave_row_sums<Shape>(grad_beta, norm.cols, shared, into + norm.cols);
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
        row_gradient<kCentered>(
            input, grad, norm, row, load_statistics<kCentered>(norm, row), reducer,
            [](int, const float(&)[8], const float(&)[8]) {}, [](int, int64_t, int64_t) {});
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
