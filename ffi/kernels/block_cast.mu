// Casts with a scale per block: 1x128 and 128x1 with fp32 scales, 1x32 and 32x1 with E8M0 scales (MXFP8), 128x128.
//
// A block of threads holds a tile of 128 x 128 elements in registers, read once, and makes both copies of it. Elements
// outside the tensor are zero and change no maximum.
#pragma once

#include "absmax.muh"
#include "patch.muh"
#include "reduce.muh"
#include "scale_rule.muh"

namespace te {

// scale_inv of block (i, j) at i * row_stride + j * col_stride.
template <class ScaleInv>
struct ScaleGrid {
    ScaleInv* scale_invs;
    int64_t row_stride;
    int64_t col_stride;

    TE_DEVICE void put(int64_t i, int64_t j, ScaleInv scale_inv) const {
        scale_invs[i * row_stride + j * col_stride] = scale_inv;
    }
};

// One fp32 scale per 128 elements.
struct Float32Scales {
    using ScaleInv = float;
    static constexpr int kPatchesOfBlock = 16;
    template <class F>
    static TE_DEVICE float scale(uint32_t amax, const ScaleRule& rule, float& scale_inv) {
        const float found = scale_from_amax(amax, rule);
        scale_inv = reciprocal(found);
        return found;
    }
};

// One E8M0 scale per 32 elements. The rule is fixed by the format.
struct E8M0Scales {
    using ScaleInv = uint8_t;
    static constexpr int kPatchesOfBlock = 4;
    template <class F>
    static TE_DEVICE float scale(uint32_t amax, const ScaleRule&, uint8_t& scale_inv) {
        const uint32_t e8m0 = e8m0_from_amax(amax, F::kReciprocalOfMax);
        scale_inv = static_cast<uint8_t>(e8m0);
        return e8m0_scale(e8m0);
    }
};

template <class ScaleInv>
struct BlockTarget {
    uint8_t* rowwise;  // NULL: not wanted
    uint8_t* columnwise;
    bool transposed;  // order of the columnwise copy
    ScaleGrid<ScaleInv> rowwise_scales;
    ScaleGrid<ScaleInv> columnwise_scales;
    ScaleRule rule;
    EncoderChoice encoder;
};

// Largest magnitude of each of the patch's columns, as bits of fp32 numbers.
template <class T>
TE_DEVICE void columns_absmax(const Patch<T>& patch, uint32_t (&largest)[kPatch]) {
    constexpr int kColumns = Absmax<T>::kIsPair ? 2 : 1;  // of a word
#pragma unroll
    for (int i = 0; i < kPatch / kColumns; ++i) {
        Absmax<T> running;
#pragma unroll
        for (int k = 0; k < kPatch; ++k) running.take_word(patch.rows[k].parts[i / 4].words[i % 4]);
        largest[kColumns * i] = running.lower_bits();
        if constexpr (Absmax<T>::kIsPair) largest[kColumns * i + 1] = running.upper_bits();
    }
}

// ---- the rowwise copy: a block lies in one row of 16 or 4 patches, held by neighbouring lanes ----

template <class Scales, class T, class F, bool kAligned>
TE_DEVICE void cast_rowwise(const Patch<T>& patch, const Place& place, int64_t cols,
                            const BlockTarget<typename Scales::ScaleInv>& target) {
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        Absmax<T> running;
        running.take(patch.rows[k]);
        const uint32_t largest = lanes_max<Scales::kPatchesOfBlock>(running.bits());
        typename Scales::ScaleInv scale_inv;
        const float scale = Scales::template scale<F>(largest, target.rule, scale_inv);
        const int64_t row = place.row + k;
        const Vector8 codes = encode_scaled<F>(patch.rows[k], scale, target.encoder);
        store_codes<kAligned>(target.rowwise + row * cols + place.col, codes, place.count<kAligned>(k));
        if (place.col_group % Scales::kPatchesOfBlock == 0 && place.count<kAligned>(k) > 0) {
            target.rowwise_scales.put(row, place.col / (kPatch * Scales::kPatchesOfBlock), scale_inv);
        }
    }
}

// ---- the columnwise copy: a block goes down 16 or 4 row groups, so its maximum goes through shared memory ----

struct ColumnScales {
    uint32_t maxima[kPatchesAcross][kTile];  // of each row group; then scales of each block, in its first row group
};

union ColumnShared {
    ColumnScales scales;
    CodeTile tile;
};

// Turn the maxima into scales, in place; writes the scale_invs. Barriers before and after.
template <class Scales, class F>
TE_DEVICE void find_column_scales(ColumnScales& shared, const Place& place, int64_t rows, int64_t cols,
                                  const BlockTarget<typename Scales::ScaleInv>& target) {
    constexpr int kBlocksDown = kPatchesAcross / Scales::kPatchesOfBlock;
    for (int i = thread_index(); i < kBlocksDown * kTile; i += kThreads) {
        const int column = i % kTile;
        const int first_group = i / kTile * Scales::kPatchesOfBlock;
        uint32_t largest = 0;
#pragma unroll
        for (int k = 0; k < Scales::kPatchesOfBlock; ++k) {
            largest = larger(largest, shared.maxima[first_group + k][column]);
        }
        typename Scales::ScaleInv scale_inv;
        const float scale = Scales::template scale<F>(largest, target.rule, scale_inv);
        shared.maxima[first_group][column] = bits_of(scale);
        const int64_t row = place.first_row() + first_group * kPatch;
        const int64_t col = place.first_col() + column;
        if (row < rows && col < cols) {
            target.columnwise_scales.put(row / (kPatch * Scales::kPatchesOfBlock), col, scale_inv);
        }
    }
}

template <class Scales, class T, class F, bool kAligned>
TE_DEVICE void cast_columnwise(const Patch<T>& patch, const Place& place, int64_t rows, int64_t cols,
                               ColumnShared& shared, const BlockTarget<typename Scales::ScaleInv>& target) {
    uint32_t largest[kPatch];
    columns_absmax(patch, largest);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) shared.scales.maxima[place.row_group][place.col_group * kPatch + i] = largest[i];
    TE_SYNC();
    find_column_scales<Scales, F>(shared.scales, place, rows, cols, target);
    TE_SYNC();
    const int first_group = place.row_group / Scales::kPatchesOfBlock * Scales::kPatchesOfBlock;
    float scales[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        scales[i] = float_of(shared.scales.maxima[first_group][place.col_group * kPatch + i]);
    }
    Vector8 codes[kPatch];
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = patch.rows[k].value(i) * scales[i];
        codes[k] = encode_octet<F>(values, target.encoder);
        if (!target.transposed) {
            store_codes<kAligned>(target.columnwise + (place.row + k) * cols + place.col, codes[k],
                                  place.count<kAligned>(k));
        }
    }
    if (target.transposed) {  // the same for the whole grid
        transpose_codes(codes);
        TE_SYNC();  // the tile takes the place of the scales
        put_columns(shared.tile, place, codes);
        TE_SYNC();
        write_columns<kAligned>(shared.tile, place, target.columnwise, rows, cols);
    }
}

template <class Scales, class T, class F, bool kAligned>
TE_KERNEL cast_vector_blocks(const typename T::Storage* __restrict__ input, int64_t rows, int64_t cols,
                             BlockTarget<typename Scales::ScaleInv> target) {
    TE_SHARED(ColumnShared, shared);
    const Place place(block_index(), rows, cols);
    const Patch<T> patch = load_patch<T, kAligned>(input, place, cols);
    if (target.rowwise != nullptr) cast_rowwise<Scales, T, F, kAligned>(patch, place, cols, target);
    if (target.columnwise != nullptr) {
        cast_columnwise<Scales, T, F, kAligned>(patch, place, rows, cols, shared, target);
    }
}

// ---- 128 x 128: the whole tile is one block, and both copies hold the same codes ----

struct SquareShared {
    CodeTile tile;
    Partials partials;
};

template <class T, class F, bool kAligned>
TE_KERNEL cast_square_blocks(const typename T::Storage* __restrict__ input, int64_t rows, int64_t cols,
                             BlockTarget<float> target) {
    TE_SHARED(SquareShared, shared);
    const Place place(block_index(), rows, cols);
    const Patch<T> patch = load_patch<T, kAligned>(input, place, cols);
    const uint32_t largest = block_max(octets_absmax(patch.rows), shared.partials);
    const float scale = scale_from_amax(largest, target.rule);
    Vector8 codes[kPatch];
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        codes[k] = encode_scaled<F>(patch.rows[k], scale, target.encoder);
        const int64_t at = (place.row + k) * cols + place.col;
        if (target.rowwise != nullptr) store_codes<kAligned>(target.rowwise + at, codes[k], place.count<kAligned>(k));
        if (target.columnwise != nullptr && !target.transposed) {
            store_codes<kAligned>(target.columnwise + at, codes[k], place.count<kAligned>(k));
        }
    }
    if (thread_index() == 0) {
        const float scale_inv = reciprocal(scale);
        const int64_t i = place.row / kTile, j = place.col / kTile;
        if (target.rowwise != nullptr) target.rowwise_scales.put(i, j, scale_inv);
        if (target.columnwise != nullptr) target.columnwise_scales.put(i, j, scale_inv);
    }
    if (target.columnwise != nullptr && target.transposed) {  // the same for the whole grid
        transpose_codes(codes);
        put_columns(shared.tile, place, codes);
        TE_SYNC();
        write_columns<kAligned>(shared.tile, place, target.columnwise, rows, cols);
    }
}

}  // namespace te
