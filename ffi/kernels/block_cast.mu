// Casts with a scale per block: 1x128 and 128x1 with fp32 scales, 1x32 and 32x1 with E8M0 scales (MXFP8), 128x128;
// with fp32 scales by the rule of Transformer Engine or by Moore Threads' (MTFP8).
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

// One fp32 scale per 128 elements. scale() gives what scaled() takes of an element's block.
struct Float32Scales {
    using ScaleInv = float;
    static constexpr int kPatchesOfBlock = 16;
    template <class F>
    static TE_DEVICE float scale(uint32_t amax, const ScaleRule& rule, float& scale_inv) {
        const float found = scale_from_amax(amax, rule);
        scale_inv = reciprocal(found);
        return found;
    }
    static TE_LEAF float scaled(float value, float scale) { return value * scale; }
};

// The same by Moore Threads' rule: elements are divided by scale_inv (T2).
struct Mtfp8Scales {
    using ScaleInv = float;
    static constexpr int kPatchesOfBlock = 16;
    template <class F>
    static TE_DEVICE float scale(uint32_t amax, const ScaleRule&, float& scale_inv) {
        scale_inv = float_of(larger(amax, bits_of(1e-15f))) * F::kReciprocalOfMax;
        return scale_inv;
    }
    static TE_LEAF float scaled(float value, float scale_inv) { return divide(value, scale_inv); }
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
    static TE_LEAF float scaled(float value, float scale) { return value * scale; }
};

// The codes of an octet whose elements have one scale.
template <class Scales, class F, class T>
TE_LEAF Vector8 encode_block_octet(const Octet<T>& octet, float scale, EncoderChoice encoder) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = Scales::scaled(octet.value(i), scale);
    return encode_octet<F>(values, encoder);
}

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

// Maxima on their way to scales: of the 8 elements that a patch has of a row or a column, from every patch. A block's
// scale then takes the place of its first patch's maximum.
//
// `across` is indexed by column group, then row, `down` by row group, then column; rows are rotated by 8 for every
// column group, so that threads next to each other do not write to the same banks.
struct BlockMaxima {
    Vector16 across[kPatchesAcross][kTile / 4];
    Vector16 down[kPatchesAcross][kTile / 4];
};

union BlockShared {
    BlockMaxima maxima;
    CodeTile tile;
};

TE_DEVICE int rotated(int group, int row) {
    return (row + kPatch * group) % kTile;
}

TE_DEVICE uint32_t& word_of(Vector16 (&group)[kTile / 4], int i) {
    return group[i / 4].words[i % 4];
}

TE_DEVICE void put_eight(Vector16 (&group)[kTile / 4], int first, const uint32_t (&words)[kPatch]) {
    group[first / 4] = Vector16{{words[0], words[1], words[2], words[3]}};
    group[first / 4 + 1] = Vector16{{words[4], words[5], words[6], words[7]}};
}

TE_DEVICE void get_eight(const Vector16 (&group)[kTile / 4], int first, float (&values)[kPatch]) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) values[i] = float_of(group[first / 4 + i / 4].words[i % 4]);
}

template <class T>
TE_DEVICE void put_row_maxima(const Patch<T>& patch, const Place& place, BlockMaxima& maxima) {
    uint32_t largest[kPatch];
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        Absmax<T> running;
        running.take(patch.rows[k]);
        largest[k] = running.bits();
    }
    put_eight(maxima.across[place.col_group], rotated(place.col_group, place.row_group * kPatch), largest);
}

template <class T>
TE_DEVICE void put_column_maxima(const Patch<T>& patch, const Place& place, BlockMaxima& maxima) {
    constexpr int kColumns = Absmax<T>::kIsPair ? 2 : 1;  // of a word
    uint32_t largest[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch / kColumns; ++i) {
        Absmax<T> running;
#pragma unroll
        for (int k = 0; k < kPatch; ++k) running.take_word(patch.rows[k].parts[i / 4].words[i % 4]);
        largest[kColumns * i] = running.lower_bits();
        if constexpr (Absmax<T>::kIsPair) largest[kColumns * i + 1] = running.upper_bits();
    }
    put_eight(maxima.down[place.row_group], place.col_group * kPatch, largest);
}

// Maxima to scales, in place, and the scale_invs to the tensor's grid: of columnwise blocks, whose number in the tile
// is `item`.
template <class Scales, class F>
TE_DEVICE void find_column_scale(BlockMaxima& maxima, const Place& place, int64_t rows, int64_t cols, int item,
                                 const BlockTarget<typename Scales::ScaleInv>& target) {
    constexpr int kGroups = Scales::kPatchesOfBlock;
    const int column = item % kTile;
    const int first_group = item / kTile * kGroups;
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) largest = larger(largest, word_of(maxima.down[first_group + k], column));
    typename Scales::ScaleInv scale_inv;
    word_of(maxima.down[first_group], column) = bits_of(Scales::template scale<F>(largest, target.rule, scale_inv));
    const int64_t row = place.first_row() + first_group * kPatch, col = place.first_col() + column;
    if (row < rows && col < cols) target.columnwise_scales.put(row / (kPatch * kGroups), col, scale_inv);
}

// Of the rowwise block in row `row` of the tile, which is as long as the tile.
template <class Scales, class F>
TE_DEVICE void find_row_scale(BlockMaxima& maxima, const Place& place, int64_t rows, int row,
                              const BlockTarget<typename Scales::ScaleInv>& target) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kPatchesAcross; ++k) largest = larger(largest, word_of(maxima.across[k], rotated(k, row)));
    typename Scales::ScaleInv scale_inv;
    word_of(maxima.across[0], row) = bits_of(Scales::template scale<F>(largest, target.rule, scale_inv));
    const int64_t at = place.first_row() + row;
    if (at < rows) target.rowwise_scales.put(at, place.first_col() / kTile, scale_inv);
}

// Blocks of 32: a row's block lies in four neighbouring threads, and the four scale bytes of a row go out together.
template <class Scales, class F, class T>
TE_DEVICE void find_short_row_scales(const Patch<T>& patch, const Place& place, float (&scales)[kPatch],
                                     const BlockTarget<typename Scales::ScaleInv>& target) {
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        Absmax<T> running;
        running.take(patch.rows[k]);
        typename Scales::ScaleInv scale_inv;
        scales[k] = Scales::template scale<F>(four_lanes_max(running.bits()), target.rule, scale_inv);
        if (place.col_group % 4 == 0 && k < place.rows_left && place.cols_left > 0) {
            target.rowwise_scales.put(place.row + k, place.col / 32, scale_inv);
        }
    }
}

template <class Scales, class F, bool kAligned, class T>
TE_DEVICE void cast_rows(const Patch<T>& patch, const Place& place, int64_t cols, const float (&scales)[kPatch],
                         uint8_t* output, EncoderChoice encoder) {
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        const Vector8 codes = encode_block_octet<Scales, F>(patch.rows[k], scales[k], encoder);
        store_codes<kAligned>(output + (place.row + k) * cols + place.col, codes, place.count<kAligned>(k));
    }
}

// The patch's codes with a scale per column, as rows.
template <class Scales, class F, class T>
TE_DEVICE void encode_columns(const Patch<T>& patch, const float (&scales)[kPatch], EncoderChoice encoder,
                              Vector8 (&codes)[kPatch]) {
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = Scales::scaled(patch.rows[k].value(i), scales[i]);
        codes[k] = encode_octet<F>(values, encoder);
    }
}

// The columnwise copy, once the scales are found. Barriers inside where it is transposed.
template <class Scales, class T, class F, bool kAligned>
TE_DEVICE void cast_columns(const Patch<T>& patch, const Place& place, int64_t rows, int64_t cols, BlockShared& shared,
                            const BlockTarget<typename Scales::ScaleInv>& target) {
    const int group = place.row_group / Scales::kPatchesOfBlock * Scales::kPatchesOfBlock;
    float scales[kPatch];
    get_eight(shared.maxima.down[group], place.col_group * kPatch, scales);
    Vector8 codes[kPatch];
    encode_columns<Scales, F>(patch, scales, target.encoder, codes);
    if (target.transposed) {  // the same for the whole grid
        transpose_codes(codes);
        TE_SYNC();  // the tile takes the place of the scales
        put_columns(shared.tile, place, codes);
        TE_SYNC();
        write_columns<kAligned>(shared.tile, place, target.columnwise, rows, cols);
    } else {
#pragma unroll
        for (int k = 0; k < kPatch; ++k) {
            uint8_t* const at = target.columnwise + (place.row + k) * cols + place.col;
            store_codes<kAligned>(at, codes[k], place.count<kAligned>(k));
        }
    }
}

template <class Scales, class T, class F, bool kAligned>
TE_KERNEL cast_vector_blocks(const typename T::Storage* __restrict__ input, int64_t rows, int64_t cols,
                             BlockTarget<typename Scales::ScaleInv> target) {
    TE_SHARED(BlockShared, shared);
    constexpr bool kLong = Scales::kPatchesOfBlock == kPatchesAcross;
    constexpr int kColumnScales = kPatchesAcross / Scales::kPatchesOfBlock * kTile;
    const Place place(block_index(), rows, cols);
    const Patch<T> patch = load_patch<T, kAligned>(input, place, cols);
    const bool rowwise = target.rowwise != nullptr, columnwise = target.columnwise != nullptr;
    float row_scales[kPatch];
    if (rowwise && kLong) put_row_maxima(patch, place, shared.maxima);
    if (rowwise && !kLong) find_short_row_scales<Scales, F>(patch, place, row_scales, target);
    if (columnwise) put_column_maxima(patch, place, shared.maxima);
    TE_SYNC();
    // Long blocks: one half of the threads finds the scales of the columns, the other half those of the rows.
    const int thread = thread_index();
    for (int i = thread; columnwise && i < kColumnScales; i += kThreads) {
        find_column_scale<Scales, F>(shared.maxima, place, rows, cols, i, target);
    }
    if (rowwise && kLong && thread >= kTile) {
        find_row_scale<Scales, F>(shared.maxima, place, rows, thread - kTile, target);
    }
    TE_SYNC();
    if (rowwise) {
        if (kLong) get_eight(shared.maxima.across[0], place.row_group * kPatch, row_scales);
        cast_rows<Scales, F, kAligned>(patch, place, cols, row_scales, target.rowwise, target.encoder);
    }
    if (columnwise) cast_columns<Scales, T, F, kAligned>(patch, place, rows, cols, shared, target);
}

// ---- 128 x 128: the whole tile is one block, and both copies hold the same codes ----

struct SquareShared {
    CodeTile tile;
    Partials partials;
};

template <class Scales, class T, class F, bool kAligned>
TE_KERNEL cast_square_blocks(const typename T::Storage* __restrict__ input, int64_t rows, int64_t cols,
                             BlockTarget<float> target) {
    TE_SHARED(SquareShared, shared);
    const Place place(block_index(), rows, cols);
    const Patch<T> patch = load_patch<T, kAligned>(input, place, cols);
    const uint32_t largest = block_max(octets_absmax(patch.rows), shared.partials);
    float scale_inv;
    const float scale = Scales::template scale<F>(largest, target.rule, scale_inv);
    Vector8 codes[kPatch];
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        codes[k] = encode_block_octet<Scales, F>(patch.rows[k], scale, target.encoder);
        const int64_t at = (place.row + k) * cols + place.col;
        if (target.rowwise != nullptr) store_codes<kAligned>(target.rowwise + at, codes[k], place.count<kAligned>(k));
        if (target.columnwise != nullptr && !target.transposed) {
            store_codes<kAligned>(target.columnwise + at, codes[k], place.count<kAligned>(k));
        }
    }
    if (thread_index() == 0) {
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
