// gemm (G1-G4): a tiled product for operands of every type, format, copy and layout, on the units that every device
// has.
//
// Backends prefer the vendor's library where it does what is asked; this kernel is what is always there.
#pragma once

#include "../library/gemm_request.h"
#include "gemm_operand.muh"
#include "resident.muh"

namespace te {

struct GemmResult {
    void* out;
    int32_t dtype;
    bool accumulate;
    const void* bias;  // NULL: none; one for each column of the result
    int32_t bias_dtype;
};

// A block makes a tile of 16 * kMicro rows and columns, a thread kMicro of both; steps are so long that every thread
// loads one octet of each operand.
template <int kMicro>
struct GemmTile {
    static constexpr int kEdge = 16 * kMicro;
    static constexpr int kStep = kThreads * 8 / kEdge;
    static constexpr int kPitch = kEdge + 4;  // keeps groups of four aligned, and columns on different banks
    struct Shared {
        alignas(16) float a[kStep][kPitch];
        alignas(16) float b[kStep][kPitch];
    };
};

struct alignas(16) FourFloats {
    float values[4];
};

// The octet of a step that belongs to this thread: its place in the tile.
template <int kMicro>
struct StepPlace {
    int outer;
    int inner;

    TE_DEVICE explicit StepPlace(bool runs_inner) {
        using Tile = GemmTile<kMicro>;
        const int across = (runs_inner ? Tile::kStep : Tile::kEdge) / 8;
        const int line = thread_index() / across, octet = thread_index() % across * 8;
        outer = runs_inner ? line : octet;
        inner = runs_inner ? octet : line;
    }
    template <int kStep, int kPitch>
    TE_DEVICE void put(float (&tile)[kStep][kPitch], bool runs_inner, const float (&values)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (runs_inner) {
                tile[inner + i][outer] = values[i];
            } else {
                tile[inner][outer + i] = values[i];
            }
        }
    }
};

// The thread's rows (or columns) of the tile, in groups of four that lie 64 apart.
template <int kMicro>
TE_DEVICE void load_micro(const float (&line)[GemmTile<kMicro>::kPitch], int thread, float (&values)[kMicro]) {
#pragma unroll
    for (int group = 0; group < kMicro / 4; ++group) {
        const FourFloats four = *reinterpret_cast<const FourFloats*>(&line[group * 64 + thread * 4]);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[group * 4 + i] = four.values[i];
    }
}

template <int kMicro>
TE_DEVICE void add_step(const typename GemmTile<kMicro>::Shared& shared, float (&sums)[kMicro][kMicro]) {
    const int down = thread_index() / 16, across = thread_index() % 16;
#pragma unroll 4
    for (int c = 0; c < GemmTile<kMicro>::kStep; ++c) {
        float a[kMicro], b[kMicro];
        load_micro<kMicro>(shared.a[c], down, a);
        load_micro<kMicro>(shared.b[c], across, b);
#pragma unroll
        for (int i = 0; i < kMicro; ++i) {
#pragma unroll
            for (int j = 0; j < kMicro; ++j) sums[i][j] = multiply_add(a[i], b[j], sums[i][j]);
        }
    }
}

// G3: both scales as one factor, unless their product leaves the normal range; then the larger one first.
struct SumScale {
    float first;
    float second;

    TE_DEVICE SumScale(const GemmOperand& a, const GemmOperand& b) {
        const float of_a = a.scale_inv == nullptr ? 1.0f : *a.scale_inv * a.scale_factor;
        const float of_b = b.scale_inv == nullptr ? 1.0f : *b.scale_inv * b.scale_factor;
        const float product = of_a * of_b;
        const uint32_t magnitude = bits_of(product) & kAllButSign;
        const bool is_normal = magnitude >= 0x00800000u && magnitude < kInfinityBits;
        first = is_normal ? product : of_a < of_b ? of_b : of_a;
        second = is_normal ? 1.0f : of_a < of_b ? of_a : of_b;
    }
};

TE_DEVICE void finish_element(const GemmResult& result, const SumScale& scale, int64_t row, int64_t col, int64_t cols,
                              float sum) {
    sum = sum * scale.first * scale.second;
    if (result.bias != nullptr) sum = sum + load_value(result.bias, result.bias_dtype, col);
    const int64_t index = row * cols + col;
    if (result.accumulate) sum = sum + load_value(result.out, result.dtype, index);
    store_value(result.out, result.dtype, index, sum);
}

template <int kMicro>
TE_KERNEL_RESIDENT(2)
multiply_tiles(GemmOperand a, GemmOperand b, GemmResult result) {
    using Tile = GemmTile<kMicro>;
    TE_SHARED(typename Tile::Shared, shared);
    const int64_t tiles_across = (b.outer + Tile::kEdge - 1) / Tile::kEdge;
    const int64_t first_row = block_index() / tiles_across * Tile::kEdge;
    const int64_t first_col = block_index() % tiles_across * Tile::kEdge;
    const StepPlace<kMicro> of_a(a.runs_inner), of_b(b.runs_inner);
    float sums[kMicro][kMicro] = {};
    for (int64_t inner = 0; inner < a.inner; inner += Tile::kStep) {
        float from_a[8], from_b[8];
        load_operand(a, first_row + of_a.outer, inner + of_a.inner, from_a);
        load_operand(b, first_col + of_b.outer, inner + of_b.inner, from_b);
        TE_SYNC();  // the step before has been read
        of_a.put(shared.a, a.runs_inner, from_a);
        of_b.put(shared.b, b.runs_inner, from_b);
        TE_SYNC();
        add_step<kMicro>(shared, sums);
    }
    const SumScale scale(a, b);
    const int down = thread_index() / 16, across = thread_index() % 16;
#pragma unroll
    for (int i = 0; i < kMicro; ++i) {
#pragma unroll
        for (int j = 0; j < kMicro; ++j) {
            const int64_t row = first_row + i / 4 * 64 + down * 4 + i % 4;
            const int64_t col = first_col + j / 4 * 64 + across * 4 + j % 4;
            if (row < a.outer && col < b.outer) finish_element(result, scale, row, col, b.outer, sums[i][j]);
        }
    }
}

// Small tiles where large ones would leave much of a device idle.
constexpr int64_t kEnoughTiles = 64;

inline int32_t launch_gemm(const GemmOperand& a, const GemmOperand& b, const GemmResult& result, uintptr_t stream) {
    const auto tiles = [&](int64_t edge) { return ceil_divide(a.outer, edge) * ceil_divide(b.outer, edge); };
    if (tiles(GemmTile<8>::kEdge) >= kEnoughTiles) {
        return launch(tiles(GemmTile<8>::kEdge), stream, &multiply_tiles<8>, a, b, result);
    }
    return launch(tiles(GemmTile<4>::kEdge), stream, &multiply_tiles<4>, a, b, result);
}

inline int32_t gemm(int32_t layout, int64_t m, int64_t n, int64_t k, uintptr_t a, int32_t a_dtype, int32_t a_copy,
                    int32_t a_mode, uintptr_t a_scale_inv, int64_t a_scale_row_stride, int64_t a_scale_col_stride,
                    uintptr_t b, int32_t b_dtype, int32_t b_copy, int32_t b_mode, uintptr_t b_scale_inv,
                    int64_t b_scale_row_stride, int64_t b_scale_col_stride, uintptr_t bias, int32_t bias_dtype,
                    uintptr_t out, int32_t out_dtype, uint32_t flags, uintptr_t, int64_t, uintptr_t stream) {
    Arguments arguments("gemm");
    arguments.code("layout", layout, TE_HAL_LAYOUT_FPROP, TE_HAL_LAYOUT_WGRAD)
        .size("m", m)
        .size("n", n)
        .size("k", k)
        .product("m * n", m, n)
        .product("m * k", m, k)
        .product("n * k", n, k)
        .plain_dtype("out_dtype", out_dtype)
        .flags(flags, TE_HAL_FLAG_ACCUMULATE)
        .require(bias == 0 || layout == TE_HAL_LAYOUT_FPROP, "bias is given; accepted with TE_HAL_LAYOUT_FPROP only");
    arguments.require(bias != 0 || bias_dtype == TE_HAL_NO_DTYPE, "bias is null; accepted with bias_dtype 0 only");
    if (bias != 0) arguments.plain_dtype("bias_dtype", bias_dtype).reads("bias", bias, n, bytes_of_dtype(bias_dtype));
    const OperandRequest first = {"a",
                                  layout == TE_HAL_LAYOUT_FPROP ? Extent{m, k} : Extent{m, n},
                                  layout != TE_HAL_LAYOUT_WGRAD,
                                  a,
                                  a_dtype,
                                  a_copy,
                                  a_mode,
                                  a_scale_inv,
                                  a_scale_row_stride,
                                  a_scale_col_stride};
    const OperandRequest second = {"b",
                                   layout == TE_HAL_LAYOUT_WGRAD ? Extent{m, k} : Extent{n, k},
                                   layout == TE_HAL_LAYOUT_FPROP,
                                   b,
                                   b_dtype,
                                   b_copy,
                                   b_mode,
                                   b_scale_inv,
                                   b_scale_row_stride,
                                   b_scale_col_stride};
    check_operand(arguments, first);
    check_operand(arguments, second);
    const int64_t rows = first.outer(), cols = second.outer();
    const int32_t status = arguments.writes("out", out, elements_of(rows, cols), bytes_of_dtype(out_dtype)).status();
    if (status != TE_HAL_OK || elements_of(rows, cols) == 0) return status;
    const GemmResult result = {pointer<void>(out), out_dtype, (flags & TE_HAL_FLAG_ACCUMULATE) != 0,
                               pointer<const void>(bias), bias_dtype};
    return launch_gemm(gemm_operand(first), gemm_operand(second), result, stream);
}

}  // namespace te
