// Transposition of plain bytes, 16-bit and 32-bit elements.
#pragma once

#include "../library/arguments.h"
#include "../library/cast_launches.h"
#include "../library/launch.h"
#include "patch.muh"

namespace te {

// Bytes: the same way as a cast, through a tile of codes.
template <bool kAligned>
TE_KERNEL transpose_bytes(const uint8_t* __restrict__ input, uint8_t* __restrict__ output, int64_t rows, int64_t cols,
                          bool from_the_end) {
    TE_SHARED(CodeTile, tile);
    const Place place(from_the_end ? block_from_the_end() : block_index(), rows, cols);
    Vector8 codes[kPatch];
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        codes[k] = load_codes<kAligned>(input + (place.row + k) * cols + place.col, place.count<kAligned>(k));
    }
    transpose_codes(codes);
    put_columns(tile, place, codes);
    TE_SYNC();
    write_columns<kAligned>(tile, place, output, rows, cols);
}

// Wider elements: a square of 64 through shared memory; the odd row length spreads a column over all banks.
constexpr int kSquare = 64;

template <class Element>
struct Square {
    Element elements[kSquare][kSquare + 1];
};

template <class Element>
TE_KERNEL transpose_elements(const Element* __restrict__ input, Element* __restrict__ output, int64_t rows,
                             int64_t cols) {
    TE_SHARED(Square<Element>, square);
    const int64_t squares_across = (cols + kSquare - 1) / kSquare;
    const int64_t first_row = block_index() / squares_across * kSquare;
    const int64_t first_col = block_index() % squares_across * kSquare;
    const int across = thread_index() % kSquare;
    const int down = thread_index() / kSquare;
    constexpr int kStep = kThreads / kSquare;
#pragma unroll
    for (int k = 0; k < kSquare; k += kStep) {
        const int64_t row = first_row + down + k, col = first_col + across;
        if (row < rows && col < cols) square.elements[down + k][across] = input[row * cols + col];
    }
    TE_SYNC();
#pragma unroll
    for (int k = 0; k < kSquare; k += kStep) {
        const int64_t row = first_row + across, col = first_col + down + k;
        if (row < rows && col < cols) output[col * rows + row] = square.elements[across][down + k];
    }
}

int32_t launch_transpose_bytes(uintptr_t input, uintptr_t output, int64_t rows, int64_t cols, bool was_just_written,
                               uintptr_t stream) {
    const bool aligned = is_aligned(input | output, 8) && is_multiple(rows | cols, 8);
    return launch(tiles_of(rows, cols), stream, aligned ? &transpose_bytes<true> : &transpose_bytes<false>,
                  pointer<const uint8_t>(input), pointer<uint8_t>(output), rows, cols, was_just_written);
}

template <class Element>
int32_t launch_transpose_elements(uintptr_t input, uintptr_t output, int64_t rows, int64_t cols, uintptr_t stream) {
    return launch(ceil_divide(rows, kSquare) * ceil_divide(cols, kSquare), stream, &transpose_elements<Element>,
                  pointer<const Element>(input), pointer<Element>(output), rows, cols);
}

inline int32_t transpose(uintptr_t input, uintptr_t output, int64_t rows, int64_t cols, int32_t element_bytes,
                         uintptr_t stream) {
    const int32_t status =
        Arguments("transpose")
            .size("rows", rows)
            .size("cols", cols)
            .product("rows * cols", rows, cols)
            .require(element_bytes == 1 || element_bytes == 2 || element_bytes == 4, "element_bytes is not 1, 2 or 4")
            .reads("input", input, elements_of(rows, cols), element_bytes)
            .writes("output", output, elements_of(rows, cols), element_bytes)
            .status();
    if (status != TE_HAL_OK || rows * cols == 0) return status;
    switch (element_bytes) {
        case 1:
            return launch_transpose_bytes(input, output, rows, cols, false, stream);
        case 2:
            return launch_transpose_elements<uint16_t>(input, output, rows, cols, stream);
        default:
            return launch_transpose_elements<uint32_t>(input, output, rows, cols, stream);
    }
}

}  // namespace te
