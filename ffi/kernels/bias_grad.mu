// bias_grad (G5): the sum of a gradient's rows; and the same beside the cast of the gradient, which is read once.
#pragma once

#include "../library/fused_request.h"

namespace te {

inline int64_t bias_grad_workspace_bytes(int64_t rows, int64_t cols) {
    return column_sum_bytes(rows, cols);
}

template <class Reader>
PlainSource<Reader> gradient_source(uintptr_t grad_output, int32_t grad_dtype, int64_t cols) {
    return {make_reader<Reader>(grad_output, grad_dtype, cols), cols};
}

inline void check_gradient(Arguments& arguments, uintptr_t grad_output, int32_t grad_dtype, int64_t rows, int64_t cols,
                           uintptr_t grad_bias, int32_t grad_bias_dtype) {
    arguments.plain_dtype("grad_dtype", grad_dtype)
        .plain_dtype("grad_bias_dtype", grad_bias_dtype)
        .size("rows", rows)
        .size("cols", cols)
        .product("rows * cols", rows, cols)
        .reads("grad_output", grad_output, elements_of(rows, cols), bytes_of_dtype(grad_dtype))
        .writes("grad_bias", grad_bias, cols, bytes_of_dtype(grad_bias_dtype));
}

inline int32_t bias_grad(uintptr_t grad_output, int32_t grad_dtype, int64_t rows, int64_t cols, uintptr_t grad_bias,
                         int32_t grad_bias_dtype, uintptr_t workspace, int64_t workspace_size, uintptr_t stream) {
    Arguments arguments("bias_grad");
    check_gradient(arguments, grad_output, grad_dtype, rows, cols, grad_bias, grad_bias_dtype);
    int32_t status = arguments.workspace(workspace, workspace_size, bias_grad_workspace_bytes(rows, cols)).status();
    if (status != TE_HAL_OK || cols == 0) return status;
    if (rows > 0) {
        status = with_reader(AccessFinder(cols).reads(grad_output, grad_dtype).found(), [&](auto reader) {
            using Reader = decltype(reader);
            return launch(tiles_of(rows, cols), stream, &sum_columns<Reader>,
                          gradient_source<Reader>(grad_output, grad_dtype, cols), rows, pointer<float>(workspace));
        });
        if (status != TE_HAL_OK) return status;
    }
    return launch_column_sums(workspace, rows, cols, grad_bias, grad_bias_dtype, stream);
}

inline int32_t bias_grad_quantize(uintptr_t grad_output, int32_t grad_dtype, int64_t rows, int64_t cols,
                                  uintptr_t grad_bias, int32_t grad_bias_dtype, int32_t mode, uintptr_t scale,
                                  uintptr_t amax, double scale_epsilon, uint32_t flags, uintptr_t rowwise_data,
                                  uintptr_t columnwise_data, int32_t columnwise_order, uintptr_t rowwise_scale_inv,
                                  uintptr_t columnwise_scale_inv, int32_t output_dtype, uintptr_t workspace,
                                  int64_t workspace_size, uintptr_t stream) {
    const CastRequest request = {mode,
                                 scale,
                                 amax,
                                 scale_epsilon,
                                 flags,
                                 rowwise_data,
                                 columnwise_data,
                                 columnwise_order,
                                 rowwise_scale_inv,
                                 columnwise_scale_inv,
                                 output_dtype};
    Arguments arguments("bias_grad_quantize");
    check_gradient(arguments, grad_output, grad_dtype, rows, cols, grad_bias, grad_bias_dtype);
    check_cast(arguments, request, rows, cols);
    int32_t status = arguments.flags(flags, TE_HAL_FLAG_POWER_OF_2)
                         .workspace(workspace, workspace_size, fused_workspace_bytes(mode, rows, cols))
                         .status();
    if (status != TE_HAL_OK) return status;
    const uintptr_t sums = column_sums_in(workspace);
    const int64_t count = rows * cols;
    if (count == 0) {
        status = cast_nothing(request, workspace, stream);
        return status != TE_HAL_OK ? status : launch_column_sums(sums, rows, cols, grad_bias, grad_bias_dtype, stream);
    }
    LastPass pass = {rows, cols, grad_dtype, workspace, 0, sums};
    if (mode == TE_HAL_MODE_TENSOR_CURRENT) {
        pass.partial_count = amax_blocks(grad_dtype, count);
        status = launch_amax_of_elements(grad_output, grad_dtype, count, workspace, 0, false, stream);
        if (status != TE_HAL_OK) return status;
    }
    status = with_reader(AccessFinder(cols).reads(grad_output, grad_dtype).found(), [&](auto reader) {
        using Reader = decltype(reader);
        return launch_last_pass(gradient_source<Reader>(grad_output, grad_dtype, cols), request, pass, stream);
    });
    return status != TE_HAL_OK ? status : launch_column_sums(sums, rows, cols, grad_bias, grad_bias_dtype, stream);
}

}  // namespace te
