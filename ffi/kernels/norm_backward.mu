// norm_bwd (N4): grad_input row by row; the gradients of gamma and beta as column sums.
//
// Rows of up to 8192 columns are read once: a fixed number of blocks goes through all rows and each thread keeps the
// sums of its own columns in registers. For longer rows these do not fit, and a second kernel forms the sums.
#pragma once

#include "../library/fused_request.h"
#include "../library/multiprocessors.h"
#include "../library/norm_request.h"
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
    PlainWriter grad_input;
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

// grad_input = rstd * (grad * gamma - (mean of that) - n * (mean of that times n)). visit(k, n, grad) sees each octet
// once; used(k, col, left) is called when an octet is no longer needed.
template <bool kCentered, class Shape, class Reader, class Visit, class Used>
TE_DEVICE void row_gradient(const RowOperand<Shape, Reader>& input, const RowOperand<Shape, Reader>& grad,
                            const NormBackward<Reader>& norm, int64_t row, RowReducer<Shape>& reducer,
                            const Visit& visit, const Used& used) {
    const RowStatistics statistics = {kCentered ? norm.mean[row] : 0.0f, norm.rstd[row]};
    const float count = static_cast<float>(norm.cols);
    float sum = 0.0f, projection = 0.0f;
    float n[8], g[8], gamma[8];
    each_octet<Shape>(norm.cols, [&](int k, int64_t col, int64_t left) {
        load_gradients<kCentered>(input, grad, norm, statistics, k, col, left, n, g);
        load_gamma(norm.weights, col, left, gamma);
        visit(k, n, g);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float weighted = g[i] * gamma[i];
            if (kCentered) sum = sum + weighted;
            projection = projection + weighted * n[i];
        }
    });
    if (kCentered) {
        reducer.sums(sum, projection);
    } else {
        projection = reducer.sum(projection);
    }
    sum = divide(sum, count);
    projection = divide(projection, count);
    each_octet<Shape>(norm.cols, [&](int k, int64_t col, int64_t left) {
        load_gradients<kCentered>(input, grad, norm, statistics, k, col, left, n, g);
        load_gamma(norm.weights, col, left, gamma);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float away = kCentered ? n[i] * projection + sum : n[i] * projection;
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
        each_octet<Shape>(cols, [&](int k, int64_t col, int64_t left) {
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
            grad_gamma[k][i] = grad_gamma[k][i] + g[i] * n[i];
            if (kCentered) grad_beta[k][i] = grad_beta[k][i] + g[i];
        }
    };
    RowOperand<Shape, Reader> input, grad;
    int64_t row = first_row<Shape>();
    input.load(norm.input, row * norm.cols, row < norm.rows ? norm.cols : 0);
    grad.load(norm.grad, row * norm.cols, row < norm.rows ? norm.cols : 0);
    for (; row < norm.rows; row += row_step<Shape>()) {
        // The next row is on its way while this one's results are still being formed.
        const int64_t next = row + row_step<Shape>();
        row_gradient<kCentered>(input, grad, norm, row, reducer, add, [&](int k, int64_t col, int64_t left) {
            const int64_t count = next < norm.rows ? left : 0;
            input.reload(norm.input, k, next * norm.cols + col, count);
            grad.reload(norm.grad, k, next * norm.cols + col, count);
        });
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
            input, grad, norm, row, reducer, [](int, const float(&)[8], const float(&)[8]) {},
            [](int, int64_t, int64_t) {});
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
                grad_gamma[i] = grad_gamma[i] + g[i] * (n[i] * rstd);
                if (kCentered) grad_beta[i] = grad_beta[i] + g[i];
            }
        }
    }
    float* const into = norm.partials + place.first_row() / kTile * norm.cols * (kCentered ? 2 : 1) + place.first_col();
    leave_tile_sums(shared, place, grad_gamma, into);
    if (kCentered) leave_tile_sums(shared, place, grad_beta, into + norm.cols);
}

inline int64_t norm_sums(int32_t norm, int64_t cols) {
    return elements_of(cols, norm == TE_HAL_LAYERNORM ? 2 : 1);
}

constexpr int64_t kLongestSummedRow = 8192;

// Of a larger device the rest stays idle: the workspace must not depend on the device.
constexpr int64_t kMostMultiprocessors = 256;

// Blocks that norm_gradients runs on: as many as the device holds at a time, so that each lives through all rows.
template <class Shape>
int64_t summing_blocks(int64_t rows, int64_t multiprocessors) {
    return smaller_of(ceil_divide(rows, Shape::kRowsOfBlock),
                      kResident<Shape> * smaller_of(multiprocessors, kMostMultiprocessors));
}

// function(RowShape<...>{}) for rows of which a thread can keep the sums.
template <class Function>
int32_t with_summing_shape(int64_t cols, const Function& function) {
    if (cols <= 32 * 8 * 4) return function(RowShape<32, 4>{});
    if (cols <= kThreads * 8) return function(RowShape<kThreads, 1>{});
    if (cols <= kThreads * 8 * 2) return function(RowShape<kThreads, 2>{});
    return function(RowShape<kThreads, 4>{});
}

inline int64_t norm_bwd_workspace_bytes(int32_t norm, int64_t rows, int64_t cols) {
    int64_t sum_rows = ceil_divide(rows, kTile);
    if (cols <= kLongestSummedRow) {
        with_summing_shape(cols, [&](auto shape) {
            sum_rows = summing_blocks<decltype(shape)>(rows, kMostMultiprocessors);
            return 0;
        });
    }
    return elements_of(sum_rows, norm_sums(norm, cols)) * 4;
}

// Launch what makes grad_input and the partial sums. `sum_rows` receives how many rows of these there are.
template <bool kCentered, class Reader>
int32_t launch_norm_gradients(const NormBackward<Reader>& norm, int64_t& sum_rows, uintptr_t stream) {
    if (norm.cols <= kLongestSummedRow) {
        return with_summing_shape(norm.cols, [&](auto shape) {
            using Shape = decltype(shape);
            sum_rows = summing_blocks<Shape>(norm.rows, multiprocessors());
            return launch(sum_rows, stream, &norm_gradients<Shape, Reader, kCentered>, norm);
        });
    }
    const bool held = norm.cols <= kThreads * 8 * 8;
    const int32_t status = launch(norm.rows, stream,
                                  held ? &norm_input_gradients<RowShape<kThreads, 8>, Reader, kCentered>
                                       : &norm_input_gradients<RowShape<kThreads, 0>, Reader, kCentered>,
                                  norm);
    if (status != TE_HAL_OK) return status;
    sum_rows = ceil_divide(norm.rows, kTile);
    return launch(sum_rows * ceil_divide(norm.cols, kTile), stream, &norm_weight_gradients<Reader, kCentered>, norm);
}

inline void check_norm_gradients(Arguments& arguments, const NormRequest& request, uintptr_t grad_output,
                                 int32_t grad_dtype, uintptr_t grad_input, uintptr_t grad_weight, uintptr_t grad_bias) {
    const int64_t rows = request.rows, cols = request.cols, elements = elements_of(rows, cols);
    arguments.code("norm", request.norm, TE_HAL_LAYERNORM, TE_HAL_RMSNORM)
        .plain_dtype("grad_dtype", grad_dtype)
        .plain_dtype("input_dtype", request.input_dtype)
        .plain_dtype("weight_dtype", request.weight_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .flags(request.flags, TE_HAL_FLAG_ZERO_CENTERED_GAMMA)
        .reads("grad_output", grad_output, elements, bytes_of_dtype(grad_dtype))
        .reads("input", request.input, elements, bytes_of_dtype(request.input_dtype))
        .reads("weight", request.weight, cols, bytes_of_dtype(request.weight_dtype))
        .reads("rstd", request.rstd, rows, 4)
        .writes("grad_input", grad_input, elements, bytes_of_dtype(request.input_dtype))
        .writes("grad_weight", grad_weight, cols, bytes_of_dtype(request.weight_dtype));
    if (is_layernorm(request)) {
        arguments.reads("mean", request.mean, rows, 4)
            .writes("grad_bias", grad_bias, cols, bytes_of_dtype(request.weight_dtype));
    } else {
        arguments.require(request.mean == 0 && grad_bias == 0, "mean and grad_bias are LayerNorm's; RMSNorm takes 0");
    }
}

template <class Reader>
NormBackward<Reader> norm_backward(const NormRequest& request, uintptr_t grad_output, int32_t grad_dtype,
                                   uintptr_t grad_input, uintptr_t workspace) {
    const int64_t cols = request.cols;
    return {make_reader<Reader>(grad_output, grad_dtype, cols),
            make_reader<Reader>(request.input, request.input_dtype, cols),
            norm_weights<Reader>(request),
            pointer<const float>(request.mean),
            pointer<const float>(request.rstd),
            request.rows,
            cols,
            plain_writer(grad_input, request.input_dtype, cols),
            pointer<float>(workspace)};
}

inline int32_t norm_bwd(int32_t norm, uintptr_t grad_output, int32_t grad_dtype, uintptr_t input, int32_t input_dtype,
                        int64_t rows, int64_t cols, uintptr_t mean, uintptr_t rstd, uintptr_t weight,
                        int32_t weight_dtype, uint32_t flags, uintptr_t grad_input, uintptr_t grad_weight,
                        uintptr_t grad_bias, uintptr_t workspace, int64_t workspace_size, uintptr_t stream) {
    const NormRequest request = {norm, input, input_dtype, rows,  cols, weight, weight_dtype,
                                 0,    0,     0.0,         flags, mean, rstd};
    Arguments arguments("norm_bwd");
    check_norm_gradients(arguments, request, grad_output, grad_dtype, grad_input, grad_weight, grad_bias);
    int32_t status =
        arguments.workspace(workspace, workspace_size, norm_bwd_workspace_bytes(norm, rows, cols)).status();
    if (status != TE_HAL_OK || cols == 0) return status;
    int64_t sum_rows = 0;
    const bool is_bfloat16 = norm_reads_bfloat16(request) && fits_bfloat16(grad_output, grad_dtype, cols);
    if (rows > 0) {
        status = with_reader(is_bfloat16, [&](auto reader) {
            const auto backward =
                norm_backward<decltype(reader)>(request, grad_output, grad_dtype, grad_input, workspace);
            return is_layernorm(request) ? launch_norm_gradients<true>(backward, sum_rows, stream)
                                         : launch_norm_gradients<false>(backward, sum_rows, stream);
        });
        if (status != TE_HAL_OK) return status;
    }
    return launch_partial_sums(workspace, sum_rows, norm_sums(norm, cols),
                               {pointer<void>(grad_weight), pointer<void>(grad_bias), cols, weight_dtype}, stream);
}

}  // namespace te
