// An operand of gemm as the entry has it: checked, and turned into what the kernel takes.
#pragma once

#include "../kernels/gemm_operand.muh"
#include "block_scales.h"
#include "element_dispatch.h"
#include "fp4_scales.h"
#include "launch.h"

namespace te {

struct Extent {
    int64_t rows;
    int64_t cols;
};

struct OperandRequest {
    const char* name;
    Extent shape;     // of the tensor, whichever copy is given
    bool keeps_rows;  // the result keeps the row index and sums over the columns; else the other way round
    uintptr_t data;
    int32_t dtype;
    int32_t copy;
    int32_t mode;
    uintptr_t scale_inv;
    int64_t scale_row_stride;
    int64_t scale_col_stride;

    int64_t outer() const { return keeps_rows ? shape.rows : shape.cols; }
    int64_t inner() const { return keeps_rows ? shape.cols : shape.rows; }
    bool is_quantized() const { return mode != TE_HAL_MODE_NONE; }
    bool is_per_tensor() const { return mode == TE_HAL_MODE_TENSOR || mode == TE_HAL_MODE_TENSOR_CURRENT; }
    Fp4ScaleLayout fp4_layout() const {
        return copy == TE_HAL_COPY_ROWWISE ? Fp4ScaleLayout(shape.rows, shape.cols)
                                           : Fp4ScaleLayout(shape.cols, shape.rows);
    }
    BlockShape blocks() const { return block_shape(mode, copy == TE_HAL_COPY_ROWWISE); }
};

inline void check_fp4_operand(Arguments& arguments, const OperandRequest& r) {
    check_fp4_sizes(arguments, r.shape.rows, r.shape.cols);
    arguments.code("the dtype of an NVFP4 operand", r.dtype, TE_HAL_FLOAT4_E2M1, TE_HAL_FLOAT4_E2M1)
        .require(r.copy != TE_HAL_COPY_COLUMNWISE_SAME,
                 "a columnwise copy of NVFP4 is TE_HAL_COPY_COLUMNWISE_TRANSPOSED")
        .require(r.scale_row_stride == 0 && r.scale_col_stride == 0,
                 "NVFP4's scales have strides of their own: 0 and 0");
    if (arguments.status() != TE_HAL_OK) return;
    const int64_t elements = elements_of(r.shape.rows, r.shape.cols);
    arguments.reads(r.name, r.data, elements / 2, 1)
        .reads("a scale_inv", r.scale_inv, elements == 0 ? 0 : r.fp4_layout().words(), 4);
}

inline void check_operand(Arguments& arguments, const OperandRequest& r) {
    const bool has_strides = r.scale_row_stride != 0 || r.scale_col_stride != 0;
    const int64_t elements = elements_of(r.shape.rows, r.shape.cols);
    arguments.code("a mode", r.mode, TE_HAL_MODE_NONE, TE_HAL_MODE_MTFP8_128X128)
        .code("a copy", r.copy, TE_HAL_COPY_ROWWISE, TE_HAL_COPY_COLUMNWISE_SAME);
    if (!r.is_quantized()) {
        arguments.plain_dtype("the dtype of a plain operand", r.dtype)
            .require(r.copy == TE_HAL_COPY_ROWWISE, "a plain operand's copy is TE_HAL_COPY_ROWWISE")
            .require(r.scale_inv == 0, "a plain operand has no scale_inv")
            .require(!has_strides, "a plain operand has no scales; accepted: strides 0 and 0")
            .reads(r.name, r.data, elements, bytes_of_dtype(r.dtype));
        return;
    }
    if (is_nvfp4(r.mode)) return check_fp4_operand(arguments, r);
    arguments.fp8_dtype("the dtype of a quantized operand", r.dtype).reads(r.name, r.data, elements, 1);
    if (r.is_per_tensor()) {
        arguments.require(!has_strides, "one scale has no strides; accepted: 0 and 0")
            .reads("a scale_inv", r.scale_inv, 1, 4);
        return;
    }
    const BlockShape blocks = r.blocks();
    check_scale_strides(arguments, blocks, r.shape.rows, r.shape.cols, r.scale_row_stride, r.scale_col_stride);
    arguments.reads("a scale_inv", r.scale_inv,
                    scale_extent(blocks, r.shape.rows, r.shape.cols, r.scale_row_stride, r.scale_col_stride),
                    scale_bytes(r.mode));
}

inline OperandScales operand_scales(const OperandRequest& r) {
    const BlockShape blocks = r.blocks();
    const auto* const scale_invs = pointer<const void>(r.scale_inv);
    const bool fp4 = is_nvfp4(r.mode), rowwise = r.copy == TE_HAL_COPY_ROWWISE;
    const ScaleKind kind = fp4                           ? ScaleKind::kE4M3
                           : r.mode == TE_HAL_MODE_MXFP8 ? ScaleKind::kE8M0
                                                         : ScaleKind::kFloat32;
    const int64_t pitch = fp4 ? r.fp4_layout().pitch : 0;
    const int64_t row_stride = fp4 ? (rowwise ? pitch : 1) : r.scale_row_stride;
    const int64_t col_stride = fp4 ? (rowwise ? 1 : pitch) : r.scale_col_stride;
    if (r.keeps_rows) return {scale_invs, kind, row_stride, col_stride, blocks.row_shift, blocks.col_shift};
    return {scale_invs, kind, col_stride, row_stride, blocks.col_shift, blocks.row_shift};
}

inline GemmOperand gemm_operand(const OperandRequest& r) {
    const bool transposed = r.copy == TE_HAL_COPY_COLUMNWISE_TRANSPOSED;
    const int64_t run = transposed ? r.shape.rows : r.shape.cols;  // elements of a row in memory
    const bool runs_inner = r.keeps_rows != transposed;
    GemmOperand operand = {};
    operand.data = pointer<const void>(r.data);
    operand.dtype = r.dtype;
    operand.outer = r.outer();
    operand.inner = r.inner();
    operand.outer_step = runs_inner ? run : 1;
    operand.inner_step = runs_inner ? 1 : run;
    operand.runs_inner = runs_inner;
    operand.is_aligned = is_aligned(r.data, r.is_quantized() ? 8 : 16) && is_multiple(run, 8);
    operand.scale_factor = is_nvfp4(r.mode) ? 1.0f / 2688.0f : 1.0f;
    if (r.is_per_tensor()) {
        operand.scale_inv = pointer<const float>(r.scale_inv);
    } else if (r.is_quantized()) {
        operand.blocks = operand_scales(r);
        if (is_nvfp4(r.mode)) {
            operand.scale_inv = pointer<const float>(r.scale_inv + static_cast<uintptr_t>(r.fp4_layout().amax_offset));
        }
    }
    return operand;
}

}  // namespace te
