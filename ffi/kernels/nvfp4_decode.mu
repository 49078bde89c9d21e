// Decoding of what nvfp4_cast.mu makes (NV7, NV8), by the same strips.
#pragma once

#include "fp4.muh"
#include "hadamard.muh"
#include "strip.muh"

namespace te {

// One copy of the data.
struct Fp4Source {
    const uint8_t* codes;
    const uint8_t* scales;
    int64_t pitch;
    const float* amax;  // NULL: the tensor's scale is left out
    bool transformed;   // and to be transformed back
};

TE_DEVICE float factor_of_block(const Fp4Source& source, int64_t line, int64_t block, bool inside) {
    const uint32_t scale = inside ? source.scales[line * source.pitch + block] : 0u;
    return source.amax == nullptr ? decode_fp8<E4M3>(scale) : Fp4Factors(*source.amax).of_block(scale);
}

template <class T, bool kAligned>
TE_KERNEL decode_nvfp4_rows(Fp4Source source, int64_t rows, int64_t cols, typename T::Storage* __restrict__ output) {
    const StripPlace place(block_index(), rows, cols);
#pragma unroll
    for (int k = 0; k < kStripRows; ++k) {
        const int64_t row = place.row + k;
        const float factor = factor_of_block(source, row, place.col / kFp4Block, place.inside);
        const uint8_t* const at = source.codes + (row * cols + place.col) / 2;
        const uint32_t codes = place.inside ? at[0] | static_cast<uint32_t>(at[1]) << 8 : 0u;
        float values[kStripCols];
#pragma unroll
        for (int i = 0; i < kStripCols; ++i) values[i] = decode_fp4((codes >> (4 * i)) & 15u) * factor;
        if (place.inside) store_quad<T, kAligned>(output + row * cols + place.col, values);
    }
}

TE_DEVICE void decode_column(const ColumnCodes& codes, float factor, bool transformed, float (&values)[kStripRows]) {
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
        values[i] = decode_fp4((codes.words[i / 8] >> (4 * (i % 8))) & 15u) * factor;
    }
    if (transformed) hadamard_transform_back(values);
}

template <class T, bool kAligned>
TE_KERNEL decode_nvfp4_columns(Fp4Source source, int64_t rows, int64_t cols, typename T::Storage* __restrict__ output) {
    TE_SHARED(StripTile, tile);
    const StripPlace place(block_index(), rows, cols);
#pragma unroll
    for (int k = 0; k < kColumnSteps; ++k) {
        const ColumnStep step(place, k, rows, cols);
        const int64_t count = step.inside ? 8 : 0;
        tile.at(step.down, step.column) = load_codes<kAligned>(source.codes + step.offset(rows), count);
    }
    TE_SYNC();
    float columns[kStripCols][kStripRows];
#pragma unroll
    for (int j = 0; j < kStripCols; ++j) {
        const float factor = factor_of_block(source, place.col + j, place.row / kFp4Block, place.inside);
        const ColumnCodes codes = tile.at(place.down, place.across * kStripCols + j);
        decode_column(codes, factor, source.transformed, columns[j]);
    }
#pragma unroll
    for (int k = 0; k < kStripRows; ++k) {
        const float values[kStripCols] = {columns[0][k], columns[1][k], columns[2][k], columns[3][k]};
        if (place.inside) store_quad<T, kAligned>(output + (place.row + k) * cols + place.col, values);
    }
}

}  // namespace te
