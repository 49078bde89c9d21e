// From addresses and dtype codes to what kernels that compute take: readers, writers, and the shape of a row's threads.
#pragma once

#include "../kernels/plain_access.muh"
#include "../kernels/row_shape.muh"
#include "element_dispatch.h"
#include "launch.h"

namespace te {

// How all tensors of a call can be accessed; the first that holds for each.
enum class Access {
    kBFloat16,  // what is read is bf16, and all is aligned
    kAligned,   // to 16 bytes, in every row
    kAny,
};

inline bool is_vector_aligned(uintptr_t address, int64_t cols) {
    return is_aligned(address, 16) && is_multiple(cols, 8);
}

// Collects the tensors of a call, in rows of `cols` elements. One that is left out (0) is no obstacle.
class AccessFinder {
  public:
    explicit AccessFinder(int64_t cols) : cols_(cols) {}

    AccessFinder& reads(uintptr_t address, int32_t dtype) {
        if (address != 0 && dtype != TE_HAL_BFLOAT16) bfloat16_ = false;
        return writes(address);
    }
    AccessFinder& writes(uintptr_t address, uintptr_t alignment = 16) {
        if (!is_aligned(address, alignment) || !is_multiple(cols_, 8)) aligned_ = false;
        return *this;
    }
    Access found() const {
        if (!aligned_) return Access::kAny;
        return bfloat16_ ? Access::kBFloat16 : Access::kAligned;
    }

  private:
    int64_t cols_;
    bool bfloat16_ = true;
    bool aligned_ = true;
};

inline void set_reader(ReaderBFloat16& reader, uintptr_t address, int32_t, int64_t) {
    reader = {pointer<const uint16_t>(address)};
}
inline void set_reader(ReaderAligned& reader, uintptr_t address, int32_t dtype, int64_t) {
    reader = {pointer<const void>(address), dtype};
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

inline void set_alignment(WriterAligned&, uintptr_t, int64_t) {}
inline void set_alignment(WriterBFloat16&, uintptr_t, int64_t) {}
inline void set_alignment(WriterAny& writer, uintptr_t address, int64_t cols) {
    writer.is_aligned = is_vector_aligned(address, cols);
}

// A writer of rows of `cols` elements; of nothing where the address is 0.
template <class Writer>
Writer make_writer(uintptr_t address, int32_t dtype, int64_t cols) {
    Writer writer;
    writer.elements = pointer<void>(address);
    writer.dtype = address == 0 ? TE_HAL_NO_DTYPE : dtype;
    set_alignment(writer, address, cols);
    return writer;
}

// function(ReaderBFloat16{}) or function(ReaderAny{}).
template <class Function>
int32_t with_reader(Access access, const Function& function) {
    return access == Access::kBFloat16 ? function(ReaderBFloat16{}) : function(ReaderAny{});
}

// The same with ReaderAligned{} in between.
template <class Function>
int32_t with_each_reader(Access access, const Function& function) {
    return access == Access::kAligned ? function(ReaderAligned{}) : with_reader(access, function);
}

// Threads that share a row of `cols` elements.
inline int64_t lanes_of_row(int64_t cols) {
    return cols <= 32 * 8 * 8 ? 32 : kThreads;
}

// function(RowShape<...>{}, reader) for rows that fit into registers.
template <class Reader, class Function>
int32_t with_held_rows(int64_t cols, const Function& function) {
    if (cols <= 32 * 8 * 4) return function(RowShape<32, 4>{}, Reader{});
    if (cols <= 32 * 8 * 8) return function(RowShape<32, 8>{}, Reader{});
    if (cols <= kThreads * 8 * 2) return function(RowShape<kThreads, 2>{}, Reader{});
    if (cols <= kThreads * 8 * 4) return function(RowShape<kThreads, 4>{}, Reader{});
    return function(RowShape<kThreads, 8>{}, Reader{});
}

// function(RowShape<...>{}, reader) for rows of `cols` elements. Which thread has which element, and with it the order
// of every sum, depends on `cols` alone.
template <class Function>
int32_t with_rows(Access access, int64_t cols, const Function& function) {
    const bool fits = cols <= kThreads * 8 * 8;
    if (fits && access == Access::kBFloat16) return with_held_rows<ReaderBFloat16>(cols, function);
    if (fits && access == Access::kAligned) return with_held_rows<ReaderAligned>(cols, function);
    return lanes_of_row(cols) == 32 ? function(RowShape<32, 0>{}, ReaderAny{})
                                    : function(RowShape<kThreads, 0>{}, ReaderAny{});
}

}  // namespace te
