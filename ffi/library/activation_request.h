// The arguments that the activation entries have in common, and the source that each kind of activation is.
#pragma once

#include "../kernels/activation_sources.muh"
#include "arguments.h"
#include "reader_dispatch.h"

namespace te {

// As the entries have them (activation_fwd and activation_bwd in te_hal.h); grad_dtype is NO_DTYPE in the forward.
struct ActivationRequest {
    int32_t activation;
    uintptr_t grad_output;
    int32_t grad_dtype;
    uintptr_t input;
    int32_t input_dtype;
    int64_t rows;
    int64_t cols;  // of the activation's output
    double limit;
    double alpha;
    double offset;
};

inline bool is_gated(int32_t activation) {
    return activation >= TE_HAL_GEGLU;
}

// Elements of the input, and of its gradient.
inline int64_t input_elements(const ActivationRequest& request) {
    return elements_of(elements_of(request.rows, request.cols), is_gated(request.activation) ? 2 : 1);
}

inline void check_activation(Arguments& arguments, const ActivationRequest& request) {
    const int64_t elements = elements_of(request.rows, request.cols);
    arguments.code("activation", request.activation, TE_HAL_GELU, TE_HAL_CLAMPED_SWIGLU)
        .plain_dtype("input_dtype", request.input_dtype)
        .size("rows", request.rows)
        .size("cols", request.cols)
        .product("rows * cols", request.rows, request.cols)
        .product("rows * cols * 2", elements, is_gated(request.activation) ? 2 : 1)
        .require(request.activation == TE_HAL_CLAMPED_SWIGLU ||
                     (request.limit == 0.0 && request.alpha == 0.0 && request.offset == 0.0),
                 "limit, alpha and offset belong to CLAMPED_SWIGLU")
        .require(request.limit == request.limit && request.alpha == request.alpha && request.offset == request.offset,
                 "limit, alpha or offset is NaN")
        .reads("input", request.input, input_elements(request), bytes_of_dtype(request.input_dtype));
    if (request.grad_dtype == TE_HAL_NO_DTYPE) return;
    arguments.plain_dtype("grad_dtype", request.grad_dtype)
        .reads("grad_output", request.grad_output, elements, bytes_of_dtype(request.grad_dtype));
}

// Rows matter where halves lie side by side; otherwise all elements are one row.
inline int64_t walked_cols(const ActivationRequest& request) {
    return is_gated(request.activation) ? request.cols : elements_of(request.rows, request.cols);
}

inline ActivationParameters activation_parameters(const ActivationRequest& request) {
    return {static_cast<float>(request.limit), static_cast<float>(request.alpha), static_cast<float>(request.offset)};
}

// function(Gelu{}) and so on, for kinds that are not gated.
template <class Function>
int32_t with_formula(int32_t activation, const Function& function) {
    switch (activation) {
        case TE_HAL_GELU:
            return function(Gelu{});
        case TE_HAL_QGELU:
            return function(Qgelu{});
        case TE_HAL_RELU:
            return function(Relu{});
        case TE_HAL_SRELU:
            return function(Srelu{});
        default:
            return function(Silu{});
    }
}

// function(Gated<Gelu>{}) and so on, for gated kinds.
template <class Function>
int32_t with_gate(int32_t activation, const Function& function) {
    switch (activation) {
        case TE_HAL_GEGLU:
            return function(Gated<Gelu>{});
        case TE_HAL_GLU:
            return function(Gated<Sigmoid>{});
        case TE_HAL_QGEGLU:
            return function(Gated<Qgelu>{});
        case TE_HAL_REGLU:
            return function(Gated<Relu>{});
        case TE_HAL_SREGLU:
            return function(Gated<Srelu>{});
        case TE_HAL_SWIGLU:
            return function(Gated<Silu>{});
        default:
            return function(ClampedSwiglu{});
    }
}

// function(source), the source of the forward's results, in rows of `cols`: walked_cols, or the activation's own. A
// plain result goes to `output`, 0 for none.
template <class Function>
int32_t with_forward_source(const ActivationRequest& r, int64_t cols, uintptr_t output, const Function& function) {
    const Access access = AccessFinder(cols).reads(r.input, r.input_dtype).writes(output).found();
    return with_reader(access, [&](auto reader) {
        using Reader = decltype(reader);
        const Reader input = make_reader<Reader>(r.input, r.input_dtype, cols);
        if (is_gated(r.activation)) {
            return with_gate(r.activation, [&](auto gate) {
                return function(GatedForward<decltype(gate), Reader>{input, cols, activation_parameters(r)});
            });
        }
        return with_formula(r.activation, [&](auto formula) {
            return function(UngatedForward<decltype(formula), Reader>{input, cols});
        });
    });
}

// function(source), the source of the gradients; `cols` and `output` as above.
template <class Function>
int32_t with_backward_source(const ActivationRequest& r, int64_t cols, uintptr_t output, const Function& function) {
    const Access access =
        AccessFinder(cols).reads(r.input, r.input_dtype).reads(r.grad_output, r.grad_dtype).writes(output).found();
    return with_reader(access, [&](auto reader) {
        using Reader = decltype(reader);
        const Reader grad = make_reader<Reader>(r.grad_output, r.grad_dtype, cols);
        const Reader input = make_reader<Reader>(r.input, r.input_dtype, cols);
        if (is_gated(r.activation)) {
            return with_gate(r.activation, [&](auto gate) {
                return function(GatedBackward<decltype(gate), Reader>{grad, input, cols, activation_parameters(r)});
            });
        }
        return with_formula(r.activation, [&](auto formula) {
            return function(UngatedBackward<decltype(formula), Reader>{grad, input, cols});
        });
    });
}

}  // namespace te
