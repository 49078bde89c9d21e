// The entries quantize_nvfp4 and dequantize_nvfp4.
#pragma once

#include "../library/cast_launches.h"
#include "../library/element_dispatch.h"
#include "../library/fp4_scales.h"
#include "../library/launch.h"
#include "nvfp4_cast.mu"
#include "nvfp4_decode.mu"

namespace te {

// quantize_nvfp4 as it is asked.
struct Fp4Request {
    uintptr_t input;
    int32_t input_dtype;
    int64_t rows;
    int64_t cols;
    int32_t mode;
    uint32_t flags;
    PhiloxKey key;
    uintptr_t rowwise_data;
    uintptr_t rowwise_scale_inv;
    uintptr_t columnwise_data;
    uintptr_t columnwise_scale_inv;

    bool by_chance() const { return (flags & TE_HAL_FLAG_BY_CHANCE) != 0; }
    // A copy is wanted if there is a place for its amax, which is written without elements, too.
    bool transforms() const { return mode == TE_HAL_MODE_NVFP4_HADAMARD && columnwise_scale_inv != 0; }
    bool takes_input_amax() const { return rowwise_scale_inv != 0 || mode != TE_HAL_MODE_NVFP4_HADAMARD; }
    bool is_aligned_to_vectors() const {
        return is_aligned(input, input_dtype == TE_HAL_FLOAT32 ? 16 : 8) && is_aligned(rowwise_data, 2) &&
               is_aligned(columnwise_data, 8);
    }
};

inline void check_fp4_copy(Arguments& arguments, const char* data_name, const char* scale_name, uintptr_t data,
                           uintptr_t scale_inv, int64_t lines, int64_t length) {
    if (data == 0 && scale_inv == 0) return;
    arguments.writes(data_name, data, elements_of(lines, length) / 2, 1)
        .writes(scale_name, scale_inv, Fp4ScaleLayout(lines, length).words(), 4);
}

inline int32_t check_fp4_request(const Fp4Request& r, uintptr_t workspace, int64_t workspace_size) {
    const bool square = r.mode == TE_HAL_MODE_NVFP4_16X16;
    Arguments arguments("quantize_nvfp4");
    check_fp4_sizes(arguments, r.rows, r.cols);
    arguments.plain_dtype("input_dtype", r.input_dtype)
        .code("mode", r.mode, TE_HAL_MODE_NVFP4, TE_HAL_MODE_NVFP4_HADAMARD)
        .flags(r.flags, square ? 0u : static_cast<uint32_t>(TE_HAL_FLAG_BY_CHANCE))
        .require(r.by_chance() || (r.key.low | r.key.high) == 0, "a seed is given without TE_HAL_FLAG_BY_CHANCE")
        .require(r.rowwise_scale_inv != 0 || r.columnwise_scale_inv != 0,
                 "rowwise_scale_inv and columnwise_scale_inv are both null; accepted: one or both, with their data")
        .unsupported_if(r.transforms() && r.input_dtype != TE_HAL_BFLOAT16, "Hadamard's transform takes bf16 alone")
        .reads("input", r.input, elements_of(r.rows, r.cols), bytes_of_dtype(r.input_dtype))
        .workspace(workspace, workspace_size, 2 * amax_workspace_bytes());
    if (arguments.status() != TE_HAL_OK) return arguments.status();
    check_fp4_copy(arguments, "rowwise_data", "rowwise_scale_inv", r.rowwise_data, r.rowwise_scale_inv, r.rows, r.cols);
    check_fp4_copy(arguments, "columnwise_data", "columnwise_scale_inv", r.columnwise_data, r.columnwise_scale_inv,
                   r.cols, r.rows);
    return arguments.status();
}

inline Fp4Copy fp4_copy(uintptr_t data, uintptr_t scale_inv, int64_t lines, int64_t length) {
    if (scale_inv == 0) return {};
    const Fp4ScaleLayout layout(lines, length);
    return {pointer<uint8_t>(data), pointer<uint8_t>(scale_inv), layout.pitch,
            pointer<float>(scale_inv + static_cast<uintptr_t>(layout.amax_offset))};
}

inline int64_t transformed_blocks(int64_t rows, int64_t cols) {
    return smaller_of(ceil_divide(elements_of(rows, cols) / (kStripRows * kStripCols), kThreads), kMaxPartials);
}

inline int32_t launch_amax_of_transformed(const Fp4Request& r, uintptr_t partials, uintptr_t stream) {
    return with_bool(is_aligned(r.input, 8), [&](auto aligned) {
        return launch(transformed_blocks(r.rows, r.cols), stream, &amax_of_transformed<decltype(aligned)::value>,
                      pointer<const uint16_t>(r.input), r.rows, r.cols, pointer<uint32_t>(partials));
    });
}

inline Fp4Target fp4_target(const Fp4Request& r, uintptr_t workspace) {
    Fp4Target target = {};
    target.rowwise = fp4_copy(r.rowwise_data, r.rowwise_scale_inv, r.rows, r.cols);
    target.columnwise = fp4_copy(r.columnwise_data, r.columnwise_scale_inv, r.cols, r.rows);
    target.square = r.mode == TE_HAL_MODE_NVFP4_16X16;
    target.transforms = r.transforms();
    target.partials = pointer<const uint32_t>(workspace);
    target.partial_count = r.takes_input_amax() ? amax_blocks(r.input_dtype, elements_of(r.rows, r.cols)) : 0;
    target.transformed_partials = pointer<const uint32_t>(workspace + static_cast<uintptr_t>(amax_workspace_bytes()));
    target.transformed_count = transformed_blocks(r.rows, r.cols);
    target.key = r.key;
    return target;
}

inline int32_t launch_fp4_cast(const Fp4Request& r, const Fp4Target& target, uintptr_t stream) {
    // Without elements one block leaves the amaxes, and finds its strips outside of no rows.
    const bool is_empty = elements_of(r.rows, r.cols) == 0;
    const int64_t rows = is_empty ? 0 : r.rows, cols = is_empty ? kFp4BlockLength : r.cols;
    const int64_t blocks = is_empty ? 1 : tiles_of(rows, cols);
    return with_plain_type(r.input_dtype, [&](auto type) {
        return with_bool(r.is_aligned_to_vectors(), [&](auto aligned) {
            return with_bool(r.by_chance(), [&](auto by_chance) {
                using T = decltype(type);
                return launch(blocks, stream, &cast_nvfp4<T, decltype(aligned)::value, decltype(by_chance)::value>,
                              pointer<const typename T::Storage>(r.input), rows, cols, target);
            });
        });
    });
}

inline int32_t quantize_nvfp4(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, int32_t mode,
                              uint32_t flags, uint32_t seed_low, uint32_t seed_high, uintptr_t rowwise_data,
                              uintptr_t rowwise_scale_inv, uintptr_t columnwise_data, uintptr_t columnwise_scale_inv,
                              uintptr_t workspace, int64_t workspace_size, uintptr_t stream) {
    const Fp4Request request = {input,
                                input_dtype,
                                rows,
                                cols,
                                mode,
                                flags,
                                {seed_low, seed_high},
                                rowwise_data,
                                rowwise_scale_inv,
                                columnwise_data,
                                columnwise_scale_inv};
    int32_t status = check_fp4_request(request, workspace, workspace_size);
    if (status != TE_HAL_OK) return status;
    const Fp4Target target = fp4_target(request, workspace);
    if (target.partial_count > 0) {
        status = launch_amax_of_elements(input, input_dtype, elements_of(rows, cols), workspace, 0, false, stream);
    }
    if (status == TE_HAL_OK && target.transforms && target.transformed_count > 0) {
        const uintptr_t partials = workspace + static_cast<uintptr_t>(amax_workspace_bytes());
        status = launch_amax_of_transformed(request, partials, stream);
    }
    return status == TE_HAL_OK ? launch_fp4_cast(request, target, stream) : status;
}

inline int32_t dequantize_nvfp4(uintptr_t data, int64_t rows, int64_t cols, int32_t copy, int32_t mode,
                                uintptr_t scale_inv, uint32_t flags, uintptr_t output, int32_t output_dtype,
                                uintptr_t stream) {
    const bool columnwise = copy == TE_HAL_COPY_COLUMNWISE_TRANSPOSED, unscaled = (flags & TE_HAL_FLAG_UNSCALED) != 0;
    const int64_t elements = elements_of(rows, cols);
    Arguments arguments("dequantize_nvfp4");
    check_fp4_sizes(arguments, rows, cols);
    const int32_t status = arguments.plain_dtype("output_dtype", output_dtype)
                               .code("copy", copy, TE_HAL_COPY_ROWWISE, TE_HAL_COPY_COLUMNWISE_TRANSPOSED)
                               .code("mode", mode, TE_HAL_MODE_NVFP4, TE_HAL_MODE_NVFP4_HADAMARD)
                               .flags(flags, TE_HAL_FLAG_UNSCALED)
                               .status();
    if (status != TE_HAL_OK) return status;
    const Fp4ScaleLayout layout = columnwise ? Fp4ScaleLayout(cols, rows) : Fp4ScaleLayout(rows, cols);
    const int32_t memory_status = arguments.reads("data", data, elements / 2, 1)
                                      .reads("scale_inv", scale_inv, elements == 0 ? 0 : layout.words(), 4)
                                      .writes("output", output, elements, bytes_of_dtype(output_dtype))
                                      .status();
    if (memory_status != TE_HAL_OK || elements == 0) return memory_status;
    const Fp4Source source = {pointer<const uint8_t>(data), pointer<const uint8_t>(scale_inv), layout.pitch,
                              unscaled ? nullptr : pointer<const float>(scale_inv + layout.amax_offset),
                              columnwise && mode == TE_HAL_MODE_NVFP4_HADAMARD && !unscaled};
    const bool vectors = is_aligned(output, output_dtype == TE_HAL_FLOAT32 ? 16 : 8) && is_aligned(data, 8);
    return with_plain_type(output_dtype, [&](auto type) {
        return with_bool(vectors, [&](auto aligned) {
            using T = decltype(type);
            constexpr bool kAligned = decltype(aligned)::value;
            const auto kernel = columnwise ? &decode_nvfp4_columns<T, kAligned> : &decode_nvfp4_rows<T, kAligned>;
            return launch(tiles_of(rows, cols), stream, kernel, source, rows, cols,
                          pointer<typename T::Storage>(output));
        });
    });
}

}  // namespace te
