// Per-tensor casts: quantize with a given scale, quantize_current, dequantize (C1-C6).
//
// Without a transposed copy the tensor is a flat run of elements. With one, tiles of 128 x 128 make both copies of one
// read.
#pragma once

#include "absmax.muh"
#include "cast_parts.muh"
#include "patch.muh"

namespace te {

struct CastShared {
    Partials scale;
    Partials amax;
};

template <class T, class F, bool kAligned>
TE_KERNEL cast_elements(const typename T::Storage* __restrict__ input, int64_t count, CastScale source,
                        CastTarget target) {
    TE_SHARED(CastShared, shared);
    constexpr int kInFlight = 8 / sizeof(typename T::Storage);
    const int64_t block = source.given == nullptr ? block_from_the_end() : block_index();
    const int64_t first = block * kThreads * kInFlight + thread_index();
    Octet<T> loaded[kInFlight];
    load_octets<T, kAligned>(loaded, input, count, first);
    const uint32_t found = octets_absmax(loaded);
    const float scale = find_cast_scale(source, target, shared.scale);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
        const int64_t at = (first + k * kThreads) * 8;
        const Vector8 codes = encode_scaled<F>(loaded[k], scale, target.encoder);
        const bool whole = kAligned && at + 8 <= count;
        if (target.rowwise != nullptr) {
            whole ? store_codes<true>(target.rowwise + at, codes, 8)
                  : store_codes<false>(target.rowwise + at, codes, count - at);
        }
        if (target.columnwise != nullptr) {
            whole ? store_codes<true>(target.columnwise + at, codes, 8)
                  : store_codes<false>(target.columnwise + at, codes, count - at);
        }
    }
    record_amax(found, source, target, shared.amax);
}

struct CastTileShared {
    CodeTile tile;
    Partials scale;
    Partials amax;
};

template <class T, class F, bool kAligned>
TE_KERNEL cast_tiles(const typename T::Storage* __restrict__ input, int64_t rows, int64_t cols, CastScale source,
                     CastTarget target) {
    TE_SHARED(CastTileShared, shared);
    const Place place(source.given == nullptr ? block_from_the_end() : block_index(), rows, cols);
    const Patch<T> patch = load_patch<T, kAligned>(input, place, cols);
    const uint32_t found = octets_absmax(patch.rows);  // here, so that elements are done with once encoded
    const float scale = find_cast_scale(source, target, shared.scale);
    Vector8 codes[kPatch];
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        codes[k] = encode_scaled<F>(patch.rows[k], scale, target.encoder);
        if (target.rowwise != nullptr) {
            store_codes<kAligned>(target.rowwise + (place.row + k) * cols + place.col, codes[k],
                                  place.count<kAligned>(k));
        }
    }
    transpose_codes(codes);
    put_columns(shared.tile, place, codes);
    record_amax(found, source, target, shared.amax);
    TE_SYNC();
    write_columns<kAligned>(shared.tile, place, target.columnwise, rows, cols);
}

// ---- decoding ----

template <class F, class T>
TE_DEVICE Octet<T> decode_octet(const Vector8& codes, float factor) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = decode_fp8<F>(code_of(codes, i)) * factor;
    return make_octet<T>(values);
}

template <class F, class T, bool kAligned>
TE_KERNEL decode_elements(const uint8_t* __restrict__ data, int64_t count, const float* __restrict__ scale_inv,
                          typename T::Storage* __restrict__ output) {
    constexpr int kInFlight = 4;
    const int64_t first = block_index() * kThreads * kInFlight + thread_index();
    const float factor = *scale_inv;
    Vector8 codes[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
        const int64_t at = (first + k * kThreads) * 8;
        const bool whole = kAligned && at + 8 <= count;
        codes[k] = whole ? load_codes<true>(data + at, 8) : load_codes<false>(data + at, count - at);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
        const int64_t at = (first + k * kThreads) * 8;
        const Octet<T> octet = decode_octet<F, T>(codes[k], factor);
        const bool whole = kAligned && at + 8 <= count;
        whole ? store_octet<T, true>(output + at, octet, 8) : store_octet<T, false>(output + at, octet, count - at);
    }
}

// data[cols, rows] to output[rows, cols]: bytes change places before they are decoded.
template <class F, class T, bool kAligned>
TE_KERNEL decode_tiles(const uint8_t* __restrict__ data, int64_t rows, int64_t cols,
                       const float* __restrict__ scale_inv, typename T::Storage* __restrict__ output) {
    TE_SHARED(CodeTile, tile);
    const Place place(block_index(), cols, rows);
    Vector8 codes[kPatch];
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        codes[k] = load_codes<kAligned>(data + (place.row + k) * rows + place.col, place.count<kAligned>(k));
    }
    transpose_codes(codes);
    put_columns(tile, place, codes);
    TE_SYNC();
    const float factor = *scale_inv;
    const ColumnReader reader(place);
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
        const int64_t row = reader.column(k);
        if (row < rows) {
            const Octet<T> octet = decode_octet<F, T>(reader.read(tile, k), factor);
            store_octet<T, kAligned>(output + row * cols + reader.first_row, octet, cols - reader.first_row);
        }
    }
}

}  // namespace te
