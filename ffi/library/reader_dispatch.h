// From addresses and dtype codes to what kernels that compute take: readers, writers, and the shape of a row's threads.
#pragma once

#include "../kernels/plain_access.muh"
#include "../kernels/row_shape.muh"
#include "element_dispatch.h"
#include "launch.h"

namespace te {

inline bool is_vector_aligned(uintptr_t address, int64_t cols) {
    return is_aligned(address, 16) && is_multiple(cols, 8);
}

// Whether ReaderBFloat16 can read a tensor with rows of `cols` elements. One that is left out (0) is no obstacle.
inline bool fits_bfloat16(uintptr_t address, int32_t dtype, int64_t cols) {
    return address == 0 || (dtype == TE_HAL_BFLOAT16 && is_vector_aligned(address, cols));
}

inline void set_reader(ReaderBFloat16& reader, uintptr_t address, int32_t, int64_t) {
    reader = {pointer<const uint16_t>(address)};
}
inline void set_reader(ReaderAny& reader, uintptr_t address, int32_t dtype, int64_t cols) {
    reader = {pointer<const void>(address), dtype, is_vector_aligned(address, cols)};
}

template <class Reader>
Reader make_reader(uintptr_t address, int32_t dtype, int64_t cols) {
    Reader reader;
    set_reader(reader, address, dtype, cols);
    return reader;
}

// function(ReaderBFloat16{}) or function(ReaderAny{}).
template <class Function>
int32_t with_reader(bool fits, const Function& function) {
    return fits ? function(ReaderBFloat16{}) : function(ReaderAny{});
}

// A writer of rows of `cols` elements; of nothing where the address is 0.
inline PlainWriter plain_writer(uintptr_t address, int32_t dtype, int64_t cols) {
    return {pointer<void>(address), address == 0 ? TE_HAL_NO_DTYPE : dtype, is_vector_aligned(address, cols)};
}

// function(RowShape<...>{}), the one for rows of `cols` elements.
template <class Function>
int32_t with_row_shape(int64_t cols, const Function& function) {
    if (cols <= 32 * 8 * 4) return function(RowShape<32, 4>{});
    if (cols <= 32 * 8 * 8) return function(RowShape<32, 8>{});
    if (cols <= kThreads * 8 * 2) return function(RowShape<kThreads, 2>{});
    if (cols <= kThreads * 8 * 4) return function(RowShape<kThreads, 4>{});
    if (cols <= kThreads * 8 * 8) return function(RowShape<kThreads, 8>{});
    return function(RowShape<kThreads, 0>{});
}

}  // namespace te
