// Casts to NVFP4 (NV1-NV6): codes of four bits, E4M3 scales of 16 neighbours, and the amax of the tensor above them.
//
// Maxima of the whole input, or of its Hadamard transform, come from launches before, one a block; every block of
// threads reduces them anew. A tile is read once for both copies; with the transform it is made a second time here,
// which costs less than its memory would.
#pragma once

#include "fp4.muh"
#include "hadamard.muh"
#include "philox.muh"
#include "reduce.muh"
#include "strip.muh"

namespace te {

// One copy of the result.
struct Fp4Copy {
    uint8_t* codes;  // NULL: not wanted
    uint8_t* scales;
    int64_t pitch;  // bytes from a line's scales to the next line's
    float* amax;
};

struct Fp4Target {
    Fp4Copy rowwise;
    Fp4Copy columnwise;
    bool square;
    bool transforms;  // the columnwise copy is that of transformed values, with maxima of its own
    const uint32_t* partials;
    int64_t partial_count;
    const uint32_t* transformed_partials;
    int64_t transformed_count;
    PhiloxKey key;
};

struct Fp4Shared {
    StripTile tile;
    Partials of_input;
    Partials of_transformed;
};

struct Fp4TensorScales {
    TensorScale rowwise;
    TensorScale columnwise;
};

// Both copies' scales; the first block leaves the amaxes. One barrier, or two with the transform.
TE_DEVICE Fp4TensorScales find_tensor_scales(const Fp4Target& target, Fp4Shared& shared) {
    const uint32_t of_input = reduce_partials(target.partials, target.partial_count, shared.of_input);
    uint32_t of_columns = of_input;
    if (target.transforms) {  // the same for the whole grid
        of_columns = reduce_partials(target.transformed_partials, target.transformed_count, shared.of_transformed);
    }
    if (block_index() == 0 && thread_index() == 0) {
        if (target.rowwise.amax != nullptr) *target.rowwise.amax = float_of(of_input);
        if (target.columnwise.amax != nullptr) *target.columnwise.amax = float_of(of_columns);
    }
    return {tensor_scale(of_input), tensor_scale(of_columns)};
}

// Draws for eight neighbours of a line, or nothing where codes are the nearest.
template <bool kByChance>
struct Fp4Rounding {
    PhiloxWords words;

    // Of the eight neighbours that element `at` of a line belongs to; `copy` 0 for rowwise, 1 for columnwise.
    TE_DEVICE Fp4Rounding(int64_t at, int64_t line, int64_t lines, uint32_t copy, PhiloxKey key) : words() {
        if constexpr (kByChance) words = philox(static_cast<uint64_t>(at / 8 * lines + line), copy, key);
    }
    TE_LEAF uint32_t encode(float value, int i) const {
        if constexpr (kByChance) {
            return encode_fp4_by_chance(value, words.draw(i));
        } else {
            return encode_fp4(value);
        }
    }
};

// Sixteen bits of codes.
template <bool kAligned>
TE_LEAF void store_quad_codes(uint8_t* at, uint32_t codes) {
    if constexpr (kAligned) {
        *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(codes);
    } else {
        at[0] = static_cast<uint8_t>(codes & 0xffu);
        at[1] = static_cast<uint8_t>(codes >> 8);
    }
}

// The rowwise copy. Exchanges inside, unless `square_amax` is that of the strip's square.
template <class T, bool kAligned, bool kByChance>
TE_DEVICE void cast_strip_rows(const Strip<T>& strip, const StripPlace& place, int64_t rows, int64_t cols,
                               const Fp4Target& target, const TensorScale& tensor, uint32_t square_amax) {
#pragma unroll
    for (int k = 0; k < kStripRows; ++k) {
        const uint32_t largest = target.square ? square_amax : four_lanes_max(quad_absmax(strip.rows[k]));
        const Fp4Scale scale = fp4_scale(largest, tensor);
        const int64_t row = place.row + k;
        const Fp4Rounding<kByChance> rounding(place.col, row, rows, 0u, target.key);
        uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < kStripCols; ++i) {
            // The four are the first or the second half of eight neighbours.
            const float value = strip.rows[k].value(i) * scale.multiplier;
            const uint32_t code = place.col % 8 == 0 ? rounding.encode(value, i) : rounding.encode(value, i + 4);
            codes |= code << (4 * i);
        }
        if (place.inside) {
            store_quad_codes<kAligned>(target.rowwise.codes + (row * cols + place.col) / 2, codes);
            if (place.across % 4 == 0) {
                target.rowwise.scales[row * target.rowwise.pitch + place.col / kFp4Block] =
                    static_cast<uint8_t>(scale.code);
            }
        }
    }
}

template <bool kByChance>
TE_DEVICE ColumnCodes encode_column(const float (&values)[kStripRows], float multiplier, int64_t row, int64_t col,
                                    int64_t cols, PhiloxKey key) {
    ColumnCodes codes = {{0u, 0u}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Fp4Rounding<kByChance> rounding(row + half * 8, col, cols, 1u, key);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes.words[half] |= rounding.encode(values[half * 8 + i] * multiplier, i) << (4 * i);
        }
    }
    return codes;
}

TE_DEVICE void round_to_bfloat16(float (&values)[kStripRows]) {
#pragma unroll
    for (int k = 0; k < kStripRows; ++k) values[k] = BFloat16::decode(BFloat16::encode(values[k]));
}

TE_DEVICE uint32_t column_absmax(const float (&values)[kStripRows]) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kStripRows; ++k) largest = larger(largest, magnitude_of(values[k]));
    return largest;
}

// The columnwise copy, into the tile.
template <class T, bool kByChance>
TE_DEVICE void cast_strip_columns(const Strip<T>& strip, const StripPlace& place, int64_t cols, const Fp4Target& target,
                                  const TensorScale& tensor, uint32_t square_amax, StripTile& tile) {
#pragma unroll
    for (int j = 0; j < kStripCols; ++j) {
        float values[kStripRows];
        column_of(strip, j, values);
        if (target.transforms) {
            hadamard_transform(values);
            round_to_bfloat16(values);
        }
        const Fp4Scale scale = fp4_scale(target.square ? square_amax : column_absmax(values), tensor);
        const int64_t col = place.col + j;
        tile.at(place.down, place.across * kStripCols + j) =
            encode_column<kByChance>(values, scale.multiplier, place.row, col, cols, target.key);
        if (place.inside) {
            target.columnwise.scales[col * target.columnwise.pitch + place.row / kFp4Block] =
                static_cast<uint8_t>(scale.code);
        }
    }
}

template <bool kAligned>
TE_DEVICE void write_strip_columns(StripTile& tile, const StripPlace& place, int64_t rows, int64_t cols,
                                   uint8_t* output) {
#pragma unroll
    for (int k = 0; k < kColumnSteps; ++k) {
        const ColumnStep step(place, k, rows, cols);
        const int64_t count = step.inside ? 8 : 0;
        store_codes<kAligned>(output + step.offset(rows), tile.at(step.down, step.column), count);
    }
}

template <class T, bool kAligned, bool kByChance>
TE_KERNEL cast_nvfp4(const typename T::Storage* __restrict__ input, int64_t rows, int64_t cols, Fp4Target target) {
    TE_SHARED(Fp4Shared, shared);
    const Fp4TensorScales tensor = find_tensor_scales(target, shared);
    const StripPlace place(block_index(), rows, cols);
    const Strip<T> strip = load_strip<T, kAligned>(input, place.row, place.col, cols, place.inside);
    // The rest of the conditions are the same for the whole grid.
    const uint32_t square_amax = target.square ? four_lanes_max(strip_absmax(strip)) : 0u;
    if (target.rowwise.codes != nullptr) {
        cast_strip_rows<T, kAligned, kByChance>(strip, place, rows, cols, target, tensor.rowwise, square_amax);
    }
    if (target.columnwise.codes != nullptr) {
        cast_strip_columns<T, kByChance>(strip, place, cols, target, tensor.columnwise, square_amax, shared.tile);
        TE_SYNC();
        write_strip_columns<kAligned>(shared.tile, place, rows, cols, target.columnwise.codes);
    }
}

// The maximum of the transformed values that each block meets.
template <bool kAligned>
TE_KERNEL amax_of_transformed(const uint16_t* __restrict__ input, int64_t rows, int64_t cols,
                              uint32_t* __restrict__ partials) {
    TE_SHARED(Partials, shared);
    const int64_t across = cols / kStripCols, strips = rows / kStripRows * across;
    uint32_t largest = 0;
    for (int64_t i = block_index() * kThreads + thread_index(); i < strips; i += block_count() * kThreads) {
        const auto strip =
            load_strip<BFloat16, kAligned>(input, i / across * kStripRows, i % across * kStripCols, cols, true);
#pragma unroll
        for (int j = 0; j < kStripCols; ++j) {
            float values[kStripRows];
            column_of(strip, j, values);
            hadamard_transform(values);
            round_to_bfloat16(values);
            largest = larger(largest, column_absmax(values));
        }
    }
    largest = block_max(largest, shared);
    if (thread_index() == 0) partials[block_index()] = largest;
}

}  // namespace te
