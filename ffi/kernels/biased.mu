// What is done with a product whose bias comes after it, in fp32: bias_activation_fwd and _bwd (F4),
// bias_residual (G6).
//
// Octet sources as in activation_sources.muh. The backward goes by tiles, because its sums go down the columns.
#pragma once

#include "../library/activation_request.h"
#include "../library/fused_request.h"
#include "activation.mu"

namespace te {

TE_DEVICE void add_values(float (&values)[8], const float (&others)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = values[i] + others[i];
}

template <class Formula, class Reader_>
struct BiasForward {
    using Reader = Reader_;
    static constexpr int kHalves = 1;
    static constexpr int kInFlight = in_flight<Reader>(4);
    struct Raw {
        typename Reader::Raw input, bias;
    };

    Reader input;
    Reader bias;
    int64_t cols;

    TE_DEVICE Raw load(int64_t row, int64_t col, int64_t left) const {
        return {input.load(row * cols + col, left), bias.load(col, left)};
    }
    TE_DEVICE void results(const Raw& raw, float (&results)[1][8]) const {
        float added[8];
        input.values(raw.input, results[0]);
        bias.values(raw.bias, added);
        add_values(results[0], added);
#pragma unroll
        for (int i = 0; i < 8; ++i) results[0][i] = Formula::value(results[0][i]);
    }
};

template <class Reader_>
struct BiasResidual {
    using Reader = Reader_;
    static constexpr int kHalves = 1;
    static constexpr int kInFlight = in_flight<Reader>(4);
    struct Raw {
        typename Reader::Raw input, bias, residual;
    };

    Reader input;
    Reader bias;
    Reader residual;
    int64_t cols;

    TE_DEVICE Raw load(int64_t row, int64_t col, int64_t left) const {
        const int64_t index = row * cols + col;
        return {input.load(index, left), bias.load(col, left), residual.load(index, left)};
    }
    TE_DEVICE void results(const Raw& raw, float (&results)[1][8]) const {
        float added[8], onto[8];
        input.values(raw.input, results[0]);
        bias.values(raw.bias, added);
        residual.values(raw.residual, onto);
        add_values(results[0], added);
        add_values(results[0], onto);
    }
};

// The gradient. Its bias is loaded once for a column (ColumnBias below), so biased_gradients() takes both.
template <class Formula, class Reader_>
struct BiasBackward {
    using Reader = Reader_;
    struct Raw {
        typename Reader::Raw grad, input;
    };

    Reader grad;
    Reader input;
    Reader bias;
    int64_t cols;

    TE_DEVICE Raw load(int64_t row, int64_t col, int64_t left) const {
        return {grad.load(row * cols + col, left), input.load(row * cols + col, left)};
    }
};

// A patch's columns have one bias each.
template <class Source>
struct ColumnBias {
    float values[8];

    TE_DEVICE ColumnBias(const Source& source, int64_t col, int64_t left) {
        source.bias.values(source.bias.load(col, left), values);
    }
};

template <class Formula, class Reader>
TE_DEVICE void biased_gradients(const BiasBackward<Formula, Reader>& source,
                                const typename BiasBackward<Formula, Reader>::Raw& raw, const float (&bias)[8],
                                float (&gradients)[8]) {
    float of_output[8];
    source.grad.values(raw.grad, of_output);
    source.input.values(raw.input, gradients);
    add_values(gradients, bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) gradients[i] = of_output[i] * Formula::slope(gradients[i]);
}

// Gradients [rows, cols], rounded, and a row of partial column sums of the fp32 ones for each row of tiles, where
// `partials` is not NULL.
template <class Source>
TE_KERNEL_RESIDENT(2)
bias_gradients(Source source, int64_t rows, typename Source::Reader::Writer output, float* partials) {
    TE_SHARED(TileSums, shared);
    const Place place(block_index(), rows, source.cols);
    const SourcePatch<Source> patch(source, place);
    const ColumnBias<Source> bias(source, place.col, place.cols_left);
    float sums[8] = {};
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        float gradients[8];
        biased_gradients(source, patch.row(source, place, k), bias.values, gradients);
        const int64_t left = patch.left(place, k);
        if (left > 0) {
            output.write((place.row + k) * source.cols + place.col, gradients, left);
            add_values(sums, gradients);
        }
    }
    if (partials != nullptr) {  // the same for the whole grid
        leave_tile_sums(shared, place, sums, partials + place.first_row() / kTile * source.cols + place.first_col());
    }
}

inline int64_t bias_activation_workspace_bytes(int64_t rows, int64_t cols) {
    return column_sum_bytes(rows, cols);
}

inline void check_bias(Arguments& arguments, uintptr_t bias, int32_t bias_dtype, int64_t cols) {
    arguments.plain_dtype("bias_dtype", bias_dtype).reads("bias", bias, cols, bytes_of_dtype(bias_dtype));
}

inline int32_t bias_activation_fwd(int32_t activation, uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols,
                                   uintptr_t bias, int32_t bias_dtype, uintptr_t output, int32_t output_dtype,
                                   uintptr_t stream) {
    const ActivationRequest request = {activation, 0, TE_HAL_NO_DTYPE, input, input_dtype, rows, cols, 0.0, 0.0, 0.0};
    Arguments arguments("bias_activation_fwd");
    check_activation(arguments, request);
    check_bias(arguments, bias, bias_dtype, cols);
    const int32_t status = arguments.require(!is_gated(activation), "a gated activation has no form with a bias")
                               .plain_dtype("output_dtype", output_dtype)
                               .writes("output", output, elements_of(rows, cols), bytes_of_dtype(output_dtype))
                               .status();
    if (status != TE_HAL_OK || elements_of(rows, cols) == 0) return status;
    const Access access = AccessFinder(cols).reads(input, input_dtype).reads(bias, bias_dtype).writes(output).found();
    return with_reader(access, [&](auto reader) {
        using Reader = decltype(reader);
        return with_formula(activation, [&](auto formula) {
            const BiasForward<decltype(formula), Reader> source = {make_reader<Reader>(input, input_dtype, cols),
                                                                   make_reader<Reader>(bias, bias_dtype, cols), cols};
            return launch_activation(source, octet_walk(rows, cols), plain_sink(source, output, output_dtype),
                                     kMaxBlocks, stream);
        });
    });
}

inline int32_t bias_activation_bwd(int32_t activation, uintptr_t grad_output, int32_t grad_dtype, uintptr_t input,
                                   int32_t input_dtype, int64_t rows, int64_t cols, uintptr_t bias, int32_t bias_dtype,
                                   uintptr_t grad_input, int32_t grad_input_dtype, uintptr_t grad_bias,
                                   int32_t grad_bias_dtype, uintptr_t workspace, int64_t workspace_size,
                                   uintptr_t stream) {
    const ActivationRequest request = {activation, grad_output, grad_dtype, input, input_dtype,
                                       rows,       cols,        0.0,        0.0,   0.0};
    const bool summed = grad_bias != 0;
    Arguments arguments("bias_activation_bwd");
    check_activation(arguments, request);
    check_bias(arguments, bias, bias_dtype, cols);
    arguments.require(!is_gated(activation), "a gated activation has no form with a bias")
        .plain_dtype("grad_input_dtype", grad_input_dtype)
        .writes("grad_input", grad_input, elements_of(rows, cols), bytes_of_dtype(grad_input_dtype));
    if (summed) {
        arguments.plain_dtype("grad_bias_dtype", grad_bias_dtype)
            .writes("grad_bias", grad_bias, cols, bytes_of_dtype(grad_bias_dtype))
            .workspace(workspace, workspace_size, bias_activation_workspace_bytes(rows, cols));
    }
    int32_t status = arguments.status();
    if (status != TE_HAL_OK) return status;
    if (elements_of(rows, cols) > 0) {
        const Access access = AccessFinder(cols)
                                  .reads(input, input_dtype)
                                  .reads(grad_output, grad_dtype)
                                  .reads(bias, bias_dtype)
                                  .writes(grad_input)
                                  .found();
        status = with_reader(access, [&](auto reader) {
            using Reader = decltype(reader);
            using Writer = typename Reader::Writer;
            return with_formula(activation, [&](auto formula) {
                using Source = BiasBackward<decltype(formula), Reader>;
                const Source source = {make_reader<Reader>(grad_output, grad_dtype, cols),
                                       make_reader<Reader>(input, input_dtype, cols),
                                       make_reader<Reader>(bias, bias_dtype, cols), cols};
                return launch(tiles_of(rows, cols), stream, &bias_gradients<Source>, source, rows,
                              make_writer<Writer>(grad_input, grad_input_dtype, cols),
                              pointer<float>(summed ? workspace : 0));
            });
        });
    }
    if (status != TE_HAL_OK || !summed) return status;
    return launch_column_sums(workspace, rows, cols, grad_bias, grad_bias_dtype, stream);
}

inline int32_t bias_residual(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, uintptr_t bias,
                             int32_t bias_dtype, uintptr_t residual, int32_t residual_dtype, uintptr_t output,
                             int32_t output_dtype, uintptr_t stream) {
    Arguments arguments("bias_residual");
    arguments.plain_dtype("input_dtype", input_dtype)
        .plain_dtype("residual_dtype", residual_dtype)
        .plain_dtype("output_dtype", output_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .reads("input", input, elements_of(rows, cols), bytes_of_dtype(input_dtype))
        .reads("residual", residual, elements_of(rows, cols), bytes_of_dtype(residual_dtype))
        .writes("output", output, elements_of(rows, cols), bytes_of_dtype(output_dtype));
    check_bias(arguments, bias, bias_dtype, cols);
    const int32_t status = arguments.status();
    if (status != TE_HAL_OK || elements_of(rows, cols) == 0) return status;
    const Access access = AccessFinder(cols)
                              .reads(input, input_dtype)
                              .reads(bias, bias_dtype)
                              .reads(residual, residual_dtype)
                              .writes(output)
                              .found();
    return with_reader(access, [&](auto reader) {
        using Reader = decltype(reader);
        const BiasResidual<Reader> source = {make_reader<Reader>(input, input_dtype, cols),
                                             make_reader<Reader>(bias, bias_dtype, cols),
                                             make_reader<Reader>(residual, residual_dtype, cols), cols};
        return launch_activation(source, octet_walk(rows, cols), plain_sink(source, output, output_dtype), kMaxBlocks,
                                 stream);
    });
}

}  // namespace te
