// What the fused entries have in common beyond their cast: the last pass, column sums, workspace, and calls without
// elements.
#pragma once

#include "../kernels/fused_tiles.muh"
#include "cast_launches.h"
#include "reader_dispatch.h"

#include <type_traits>

namespace te {

// Workspace of a fused entry: partial maxima, then rows of partial column sums.
inline int64_t column_sum_bytes(int64_t rows, int64_t cols) {
    return elements_of(ceil_divide(rows, kTile), cols) * 4;
}
inline int64_t fused_workspace_bytes(int32_t mode, int64_t rows, int64_t summed_cols) {
    const bool current = mode == TE_HAL_MODE_TENSOR_CURRENT;
    return (current || summed_cols > 0 ? amax_workspace_bytes() : 0) + column_sum_bytes(rows, summed_cols);
}
inline uintptr_t column_sums_in(uintptr_t workspace) {
    return workspace + static_cast<uintptr_t>(amax_workspace_bytes());
}

inline int32_t launch_partial_sums(uintptr_t partials, int64_t rows, int64_t cols, const SumsTarget& target,
                                   uintptr_t stream) {
    return launch(ceil_divide(cols, 32), stream, &add_partial_sums, pointer<const float>(partials), rows, cols, target);
}

// Sums of [rows, cols] whose rows of tiles have left partial sums; of none where there are no rows.
inline int32_t launch_column_sums(uintptr_t partials, int64_t rows, int64_t cols, uintptr_t into, int32_t dtype,
                                  uintptr_t stream) {
    if (into == 0 || cols == 0) return TE_HAL_OK;
    return launch_partial_sums(partials, ceil_divide(rows, kTile), cols, {pointer<void>(into), nullptr, cols, dtype},
                               stream);
}

inline void check_rounded_dtype(Arguments& arguments, const CastRequest& request, int32_t rounded_dtype) {
    if (request.mode == TE_HAL_MODE_TENSOR_CURRENT) arguments.plain_dtype("rounded_dtype", rounded_dtype);
}

// The last pass over [rows, cols] results of each half. `partials` holds the maxima of the pass before
// (TENSOR_CURRENT).
struct LastPass {
    int64_t rows;
    int64_t cols;
    int32_t rounded_dtype;
    uintptr_t partials;
    int64_t partial_count;
    uintptr_t column_sums;  // 0: not wanted
};

inline TileCast tile_cast(const CastRequest& request, const LastPass& pass) {
    const bool transposed = wants_transposed(request);
    const bool aligned = is_aligned(request.rowwise_data | request.columnwise_data, 8) && is_multiple(pass.cols, 8) &&
                         (!transposed || is_multiple(pass.rows, 8));
    return {pass.rows,
            pass.cols,
            cast_scale(request, pass.partials, pass.partial_count),
            cast_target(request),
            request.output_dtype,
            request.mode == TE_HAL_MODE_TENSOR_CURRENT ? pass.rounded_dtype : TE_HAL_NO_DTYPE,
            transposed,
            aligned,
            pointer<float>(pass.column_sums)};
}

// The format that has kernels of its own: gradients are E5M2 and all else is E4M3 in the hybrid format.
template <class Source>
using UsualFormat = typename std::conditional<Source::kIsSummed, E5M2, E4M3>::type;
template <class Source>
constexpr int32_t usual_dtype() {
    return Source::kIsSummed ? TE_HAL_FLOAT8_E5M2 : TE_HAL_FLOAT8_E4M3;
}

// Whether all that LeanCast knows is true.
template <class Source>
bool is_lean(const TileCast& cast) {
    const bool is_rule = cast.scale.given != nullptr || cast.rounded_dtype == TE_HAL_BFLOAT16;
    const bool is_layout = cast.is_aligned && is_multiple(cast.rows, 8) && cast.target.rowwise != nullptr &&
                           (cast.is_transposed || cast.target.columnwise == nullptr);
    return cast.dtype == usual_dtype<Source>() && is_settled(cast.target.encoder) && is_rule && is_layout;
}

template <class Source>
int32_t launch_last_pass(const Source& source, const CastRequest& request, const LastPass& pass, uintptr_t stream) {
    const TileCast cast = tile_cast(request, pass);
    const int64_t blocks = tiles_of(pass.rows, pass.cols) * Source::kHalves;
    if constexpr (Source::Reader::kIsCheap) {
        using Format = UsualFormat<Source>;
        if (is_lean<Source>(cast)) {
            const bool given = cast.scale.given != nullptr;
            return launch(
                blocks, stream,
                given ? &cast_results<Source, LeanCast<Format, true>> : &cast_results<Source, LeanCast<Format, false>>,
                source, cast);
        }
    }
    return launch(blocks, stream, &cast_results<Source, AnyCast>, source, cast);
}

// Without elements there is still a scale_inv to write, and with TENSOR_CURRENT a scale and an amax.
inline int32_t cast_nothing(const CastRequest& request, uintptr_t workspace, uintptr_t stream) {
    int64_t partial_count = 0;
    if (request.mode == TE_HAL_MODE_TENSOR_CURRENT) {
        const int32_t status = launch_amax_of_elements(0, TE_HAL_FLOAT32, 0, workspace, 0, false, stream);
        if (status != TE_HAL_OK) return status;
        partial_count = amax_blocks(TE_HAL_FLOAT32, 0);
    }
    return launch_cast(0, TE_HAL_FLOAT32, 0, 0, request, workspace, partial_count, stream);
}

}  // namespace te
