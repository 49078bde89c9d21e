// Decoding of what block_cast.mu makes (C6): a thread takes eight elements of an output row.
#pragma once

#include "cast.mu"

namespace te {

// Where the scale_inv of an element lies: its block is (row >> row_shift, col >> col_shift) of the tensor.
template <class ScaleInv>
struct ScaleLookup {
    const ScaleInv* scale_invs;
    int64_t row_stride;
    int64_t col_stride;
    int row_shift;
    int col_shift;

    TE_DEVICE ScaleInv at(int64_t row, int64_t col) const {
        return scale_invs[(row >> row_shift) * row_stride + (col >> col_shift) * col_stride];
    }
};

TE_DEVICE float as_factor(float scale_inv) {
    return scale_inv;
}
TE_DEVICE float as_factor(uint8_t e8m0) {
    return e8m0 == 255 ? float_of(kQuietNanBits) : e8m0_scale_inv(e8m0);
}

// col_step, row_step: distance in `data` of neighbouring columns and rows of the tensor.
template <class F, class T, class ScaleInv>
TE_KERNEL decode_blocks(const uint8_t* __restrict__ data, int64_t rows, int64_t cols, int64_t row_step,
                        int64_t col_step, ScaleLookup<ScaleInv> scales, typename T::Storage* __restrict__ output) {
    const int64_t octets_across = (cols + 7) / 8;
    const int64_t octet = block_index() * kThreads + thread_index();
    const int64_t row = octet / octets_across;
    const int64_t col = octet % octets_across * 8;
    const int64_t count = row < rows ? cols - col : 0;
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = 0.0f;
        if (i < count) {
            const uint32_t code = data[row * row_step + (col + i) * col_step];
            values[i] = decode_fp8<F>(code) * as_factor(scales.at(row, col + i));
        }
    }
    store_octet<T, false>(output + row * cols + col, make_octet<T>(values), count);
}

}  // namespace te
