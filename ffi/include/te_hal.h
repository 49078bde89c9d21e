/*
 * te_hal.h: the C ABI between te_hal and a library of device kernels.
 *
 * A kernel library exports one symbol, te_hal_get_api. It takes the highest ABI version that the caller knows and
 * returns a table of functions, or NULL if the library needs a newer caller. Everything else goes through the table.
 *
 * Rules that hold for every entry, unless it says otherwise:
 *
 *   status    Functions return a te_hal_status. They never throw, exit or print. After any status but TE_HAL_OK,
 *             last_error() has the sentence for it. What an op wrote before it failed is undefined.
 *   address   uintptr_t, of memory that the library's device can read and write; 0 means "left out" and is accepted
 *             where the entry says (optional). The caller owns all memory and keeps it until the work queued on
 *             `stream` has finished. The library keeps no address beyond that, allocates nothing that outlives a call,
 *             and frees nothing of the caller's.
 *   layout    Tensors are dense and row-major. An op sees its operand as [rows, cols]; leading dimensions are rows.
 *             Addresses are multiples of the element size. Multiples of 16, with rows of a multiple of 16 bytes, are
 *             faster; the results are the same.
 *   overlap   What an op writes must not overlap anything else that it reads or writes.
 *   size      int64_t, 0 or more. Work without elements launches nothing, except to write a result that exists all
 *             the same (an amax, a scale_inv). Products of sizes must stay below 2^60.
 *   code      int32_t, from the enums below. A value that is not listed is refused.
 *   number    double, rounded to fp32 once by the library. What the entry says of it holds of the rounded one. NaN is
 *             refused.
 *   flags     uint32_t, TE_HAL_FLAG_* added up. A flag that the entry does not list is refused.
 *   workspace Scratch memory of at least workspace_bytes(...) bytes, multiple of 16 in address. Its content does not
 *             matter before and after; two calls that may run at the same time need one each. 0 if none is needed.
 *   stream    Queue of the library's device runtime (cudaStream_t, musaStream_t), as an integer; 0 is the default
 *             queue. Work runs in order on it, on the calling thread's current device, after the call has returned.
 *             The host emulation has no queues: its work is done when the call returns.
 *   thread    Any thread may call any entry at any time.
 *   process   A library whose device was used must not be used in a forked child; the caller sees to that.
 *   checks    All arguments are checked before anything is launched. What the device alone could tell (memory that is
 *             not the device's, or was freed) is not.
 *
 * The numbered rules (A1, S1, C1 ...) are in docs/numerics.md.
 *
 * The header is C99 without dependencies. Apart from preprocessor lines it is plain declarations, so that a binding
 * generator can read it.
 */
#ifndef TE_HAL_H
#define TE_HAL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Counts up by one with every entry or code that is added; ffi/CHANGELOG.md has a line for each. */
#define TE_HAL_ABI_VERSION 3

/* ------------------------------------------------------------------------------------------------------- codes -- */

typedef enum te_hal_status {
    TE_HAL_OK                  = 0,
    TE_HAL_INVALID_ARGUMENT    = 1,  /* a null, a negative size, an unknown code or flag, a number out of range      */
    TE_HAL_MISALIGNED          = 2,  /* an address that is no multiple of what it must be                            */
    TE_HAL_SIZE_OVERFLOW       = 3,  /* a product of sizes beyond what the library can index                         */
    TE_HAL_OVERLAP             = 4,  /* a written buffer overlaps another one                                        */
    TE_HAL_WORKSPACE_TOO_SMALL = 5,  /* workspace_bytes(...) asks for more                                           */
    TE_HAL_UNSUPPORTED         = 6,  /* supports() answers no for this call                                          */
    TE_HAL_NO_DEVICE           = 7,  /* no device, no driver, or no device of that number                            */
    TE_HAL_WRONG_ARCHITECTURE  = 8,  /* the library holds no code for the device                                     */
    TE_HAL_OUT_OF_MEMORY       = 9,  /* of the host or the device                                                    */
    TE_HAL_DEVICE_ERROR        = 10, /* the device runtime refused; its number and text are in last_error()          */
    TE_HAL_KERNEL_FAULT        = 11, /* the host emulation caught a kernel breaking a rule of the devices            */
    TE_HAL_INTERNAL_ERROR      = 12  /* a defect of the library                                                      */
} te_hal_status;

typedef enum te_hal_dtype {
    TE_HAL_NO_DTYPE    = 0, /* the operand is left out                                                               */
    TE_HAL_FLOAT32     = 1,
    TE_HAL_FLOAT16     = 2,
    TE_HAL_BFLOAT16    = 3,
    TE_HAL_FLOAT8_E4M3 = 4, /* one byte; largest 448, no infinity, NaN 0x7F and 0xFF                                 */
    TE_HAL_FLOAT8_E5M2 = 5, /* one byte; largest 57344, infinities 0x7C and 0xFC                                     */
    TE_HAL_FLOAT4_E2M1 = 6  /* two codes a byte, the even index in the low half; largest 6. NVFP4's alone            */
} te_hal_dtype;

/* How many elements share one scale, and where that scale comes from. */
typedef enum te_hal_mode {
    TE_HAL_MODE_NONE           = 0, /* not quantized                                                                 */
    TE_HAL_MODE_TENSOR         = 1, /* one fp32 scale, given by the caller (delayed scaling)                         */
    TE_HAL_MODE_TENSOR_CURRENT = 2, /* one fp32 scale, found from the amax of the values that are cast               */
    TE_HAL_MODE_BLOCK_1X128    = 3, /* fp32; rowwise copy: 1x128 blocks, columnwise copy: 128x1 blocks               */
    TE_HAL_MODE_BLOCK_128X128  = 4, /* fp32; both copies hold the same codes and scales                              */
    TE_HAL_MODE_MXFP8          = 5, /* E8M0 bytes; rowwise 1x32, columnwise 32x1                                     */
    TE_HAL_MODE_NVFP4          = 6, /* E4M3 bytes and an amax; rowwise 1x16, columnwise 16x1 (NV1-NV5)               */
    TE_HAL_MODE_NVFP4_16X16    = 7, /* the same with squares: both copies hold the same codes. Since version 3       */
    TE_HAL_MODE_NVFP4_HADAMARD = 8, /* the same with a transformed columnwise copy (NV6). Since version 3            */
    TE_HAL_MODE_MTFP8_1X128    = 9, /* fp32, by the rule T2; blocks as BLOCK_1X128. Since version 3                  */
    TE_HAL_MODE_MTFP8_128X128  = 10 /* fp32, by the rule T2; blocks as BLOCK_128X128. Since version 3                */
} te_hal_mode;

/* Memory order of a columnwise copy of [rows, cols]. */
typedef enum te_hal_columnwise_order {
    TE_HAL_ORDER_TRANSPOSED = 0, /* stored as [cols, rows]                                                           */
    TE_HAL_ORDER_SAME       = 1  /* stored as [rows, cols], like the rowwise copy                                    */
} te_hal_columnwise_order;

/* Which copy of a quantized tensor an address is of. */
typedef enum te_hal_copy {
    TE_HAL_COPY_ROWWISE               = 0, /* [rows, cols]; also every tensor that is not quantized                  */
    TE_HAL_COPY_COLUMNWISE_TRANSPOSED = 1, /* [cols, rows]                                                           */
    TE_HAL_COPY_COLUMNWISE_SAME       = 2  /* [rows, cols], scales of the columnwise copy                            */
} te_hal_copy;

typedef enum te_hal_layout {
    TE_HAL_LAYOUT_FPROP = 0, /* out[M, N] = a[M, K] * b[N, K]^T                                                      */
    TE_HAL_LAYOUT_DGRAD = 1, /* out[M, K] = a[M, N] * b[N, K]                                                        */
    TE_HAL_LAYOUT_WGRAD = 2  /* out[N, K] = a[M, N]^T * b[M, K]                                                      */
} te_hal_layout;

typedef enum te_hal_norm {
    TE_HAL_LAYERNORM = 1,
    TE_HAL_RMSNORM   = 2
} te_hal_norm;

typedef enum te_hal_activation {
    TE_HAL_GELU           = 1,
    TE_HAL_QGELU          = 2,
    TE_HAL_RELU           = 3,
    TE_HAL_SRELU          = 4,
    TE_HAL_SILU           = 5,
    TE_HAL_GEGLU          = 6, /* from here on gated: the input is [rows, 2 * cols]                                  */
    TE_HAL_GLU            = 7,
    TE_HAL_QGEGLU         = 8,
    TE_HAL_REGLU          = 9,
    TE_HAL_SREGLU         = 10,
    TE_HAL_SWIGLU         = 11,
    TE_HAL_CLAMPED_SWIGLU = 12
} te_hal_activation;

typedef enum te_hal_causal {
    TE_HAL_CAUSAL_NONE         = 0,
    TE_HAL_CAUSAL_TOP_LEFT     = 1, /* query i sees keys up to i                                                     */
    TE_HAL_CAUSAL_BOTTOM_RIGHT = 2  /* query i sees keys up to i + keys - queries                                    */
} te_hal_causal;

typedef enum te_hal_amax_algo {
    TE_HAL_AMAX_MAX         = 0, /* the maximum over the window                                                      */
    TE_HAL_AMAX_MOST_RECENT = 1  /* its newest value                                                                 */
} te_hal_amax_algo;

typedef enum te_hal_flag {
    TE_HAL_FLAG_ACCUMULATE          = 1,  /* combine with what the output holds instead of overwriting it            */
    TE_HAL_FLAG_POWER_OF_2          = 2,  /* round scales down to powers of two (S4)                                 */
    TE_HAL_FLAG_ZERO_CENTERED_GAMMA = 4,  /* the weight holds gamma - 1 (N3)                                         */
    TE_HAL_FLAG_ROWWISE             = 8,  /* supports() only: a rowwise copy is wanted                               */
    TE_HAL_FLAG_COLUMNWISE          = 16, /* supports() only: a columnwise copy is wanted                            */
    TE_HAL_FLAG_MASK                = 32, /* supports() only: softmax with a mask                                    */
    TE_HAL_FLAG_BY_CHANCE           = 64, /* round by random numbers that follow from a seed (NV5). Since version 3  */
    TE_HAL_FLAG_UNSCALED            = 128 /* leave the scale of the tensor out (NV8). Since version 3                */
} te_hal_flag;

typedef enum te_hal_op {
    TE_HAL_OP_TRANSPOSE               = 1,
    TE_HAL_OP_AMAX                    = 2,
    TE_HAL_OP_COMPUTE_SCALE           = 3,
    TE_HAL_OP_UPDATE_DELAYED_SCALE    = 4,
    TE_HAL_OP_QUANTIZE                = 5,
    TE_HAL_OP_DEQUANTIZE              = 6,
    TE_HAL_OP_GEMM                    = 7,
    TE_HAL_OP_BIAS_GRAD               = 8,
    TE_HAL_OP_NORM_FWD                = 9,
    TE_HAL_OP_NORM_BWD                = 10,
    TE_HAL_OP_SOFTMAX_FWD             = 11,
    TE_HAL_OP_SOFTMAX_BWD             = 12,
    TE_HAL_OP_ACTIVATION_FWD          = 13,
    TE_HAL_OP_ACTIVATION_BWD          = 14,
    TE_HAL_OP_NORM_QUANTIZE           = 15,
    TE_HAL_OP_ACTIVATION_QUANTIZE     = 16,
    TE_HAL_OP_ACTIVATION_BWD_QUANTIZE = 17,
    TE_HAL_OP_BIAS_GRAD_QUANTIZE      = 18,
    TE_HAL_OP_BIAS_ACTIVATION_FWD     = 19,
    TE_HAL_OP_BIAS_ACTIVATION_BWD     = 20,
    TE_HAL_OP_BIAS_RESIDUAL           = 21
} te_hal_op;

/* ----------------------------------------------------------------------------------------------------- structs -- */

/* A device, as device_info() describes it. The caller sets struct_size; fields beyond it are not written. */
typedef struct te_hal_device_info {
    uint32_t struct_size;             /* in: sizeof(te_hal_device_info) of the caller                                */
    int32_t  architecture;            /* 10 * major + minor: 90 for sm_90, 31 for mp_31; 0 for the host emulation    */
    int32_t  multiprocessors;         /* host emulation: worker threads                                              */
    int32_t  wave;                    /* threads that the hardware runs in step                                      */
    int64_t  shared_memory_per_block; /* bytes                                                                       */
    int32_t  fp8_instruction;         /* 1: casts use the device's instruction, 0: the software encoder              */
    char     name[68];                /* product name, ends with 0                                                   */
} te_hal_device_info;

/* A call, as supports() is asked about it. The caller sets struct_size; fields beyond it count as 0. */
typedef struct te_hal_call {
    uint32_t struct_size;      /* sizeof(te_hal_call) of the caller                                                  */
    int32_t  op;               /* te_hal_op                                                                          */
    int32_t  kind;             /* norm: te_hal_norm; activation: te_hal_activation; gemm: te_hal_layout;
                                  softmax: te_hal_causal; else 0                                                     */
    uint32_t flags;            /* te_hal_flag                                                                        */
    int32_t  input_dtype;      /* of the first operand: input; gemm: a; backward ops: input (softmax: output)        */
    int32_t  other_dtype;      /* of the second: gemm: b; norms: weight; backward of an activation, softmax: gradient;
                                  bias_residual: residual                                                            */
    int32_t  bias_dtype;       /* gemm, layernorm, bias_activation_..., bias_residual: bias; ..._bwd_quantize,
                                  bias_grad_quantize: grad_bias; norm_bwd: gradient                                  */
    int32_t  output_dtype;     /* of the result; a quantized result: of its codes                                    */
    int32_t  input_mode;       /* te_hal_mode of a quantized first operand (dequantize, gemm)                        */
    int32_t  other_mode;       /* the same of the second (gemm)                                                      */
    int32_t  output_mode;      /* of a quantized result                                                              */
    int32_t  input_copy;       /* te_hal_copy of a quantized first operand                                           */
    int32_t  other_copy;       /* the same of the second                                                             */
    int32_t  columnwise_order; /* te_hal_columnwise_order of a quantized result with a columnwise copy               */
    int64_t  rows;             /* sizes of the call; gemm: M, N, K; softmax: all rows, keys, 0; else rows, cols, 0.  */
    int64_t  cols;             /* All 0: the question is about kinds alone.                                          */
    int64_t  depth;
} te_hal_call;

/* ------------------------------------------------------------------------------------------------------- table -- */

/*
 * The functions of a library. Lives, like every string in it, as long as the library is loaded; never written to.
 *
 * Entries are only ever added at the end. A caller reads an entry only if struct_size covers it (TE_HAL_HAS) and, where
 * its comment begins with (optional), it is not NULL. Every entry is there since ABI version 1 unless it says so.
 */
typedef struct te_hal_api {
    uint32_t struct_size; /* bytes of this table up to the end of its last entry                                     */
    uint32_t abi_version; /* TE_HAL_ABI_VERSION that the library was built with; may be above the caller's           */

    /* ---- the library ---- */

    const char *backend;       /* "musa", "cuda" or "host"                                                           */
    const char *architectures; /* what it holds code for, separated by commas: "mp_22,mp_31", "sm_90", "host"        */
    const char *version;       /* of te_hal, "0.1.0"                                                                 */
    const char *source_hash;   /* hexadecimal hash of the sources it was built from, or "unknown"                    */
    const char *compiler;      /* name, version and variant, e.g. "g++ 12.2.0 address-sanitizer"                     */

    /* Sentence for the last status but TE_HAL_OK on the calling thread; "" if there was none. Owned by the library;
       valid until the thread's next call of any entry that fails. Never NULL. */
    const char *(*last_error)(void);

    /* Number of devices. TE_HAL_NO_DEVICE, and 0, without a driver. The host emulation has one.
       May start the device runtime. */
    int32_t (*device_count)(int32_t *count);

    /* Describe device number `device` into *info. May start the device runtime. */
    int32_t (*device_info)(int32_t device, te_hal_device_info *info);

    /* TE_HAL_OK if the library can run on device number `device`; else TE_HAL_WRONG_ARCHITECTURE (the sentence names
       the device's architecture and those of the library) or TE_HAL_NO_DEVICE. */
    int32_t (*check_device)(int32_t device);

    /* Choose how casts encode FP8 on the current device: `instruction` 0 for the software encoder, which is in force
       until this is called, 1 for the device's instruction if it agrees with the software encoder, which is tried on
       393 216 bit patterns around every rounding boundary, 2 for the same tried on all 2^32 patterns. *mismatches
       receives a lower bound of how many codes differed, 0 exactly if none did; unless it is 0 the software encoder
       stays. TE_HAL_UNSUPPORTED if the library knows no instruction for the device. Waits for the device. */
    int32_t (*select_fp8_encoder)(int32_t instruction, int64_t *mismatches, uintptr_t stream);

    /* TE_HAL_OK if the described call would be carried out, TE_HAL_UNSUPPORTED (with the sentence that a user should
       see) if not, TE_HAL_INVALID_ARGUMENT if the description makes no sense (a kind or an output_mode for an op that
       has none among it), TE_HAL_SIZE_OVERFLOW if its sizes multiply to too much. An op called with what was answered
       TE_HAL_OK does not return TE_HAL_UNSUPPORTED. Host side only; the answer may be cached. */
    int32_t (*supports)(const te_hal_call *call);

    /* Bytes of workspace for an op: te_hal_op, what te_hal_call has as kind, input_dtype, output_mode, rows and cols.
       gemm: kind is the layout, rows and cols are those of `out`, input_dtype and output_mode are 0. Negative for codes
       or sizes that make no sense. Host side only; may be cached. */
    int64_t (*workspace_bytes)(int32_t op, int32_t kind, int32_t input_dtype, int32_t output_mode, int64_t rows,
                               int64_t cols);

    /* (optional) NULL except in the host emulation. How the emulated device behaves from the next launch on, for the
       whole process: `threads` of the host that share the blocks (0: one per CPU), `wave` 32 or 128, `seed` of the
       order in which waves and their threads run (negative: in sequence). Start values: 0, 32, -1, or what the
       environment variable TE_HAL_EMULATOR says ("threads=2,wave=128,seed=7") when the library is loaded. */
    int32_t (*configure_emulator)(int32_t threads, int32_t wave, int64_t seed);

    /* ---- cast ---- */

    /* output[cols, rows] = input[rows, cols] transposed. element_bytes: 1, 2 or 4. */
    int32_t (*transpose)(uintptr_t input, uintptr_t output, int64_t rows, int64_t cols, int32_t element_bytes,
                         uintptr_t stream);

    /* Cast to FP8 with a given scale (C1-C5); both copies hold the same codes.
       scale                                       fp32 [1], read by the device
       amax                  (optional)            fp32 [1], becomes max(amax, max|input|) (A1)
       rowwise_data          (optional)            [rows, cols] codes; at least one of the copies is wanted
       columnwise_data       (optional)            the columnwise copy, in columnwise_order
       ..._scale_inv         (optional)            fp32 [1], becomes 1 / scale; may be one address
       output_dtype                                TE_HAL_FLOAT8_* */
    int32_t (*quantize)(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, uintptr_t scale,
                        uintptr_t amax, uintptr_t rowwise_data, uintptr_t columnwise_data, int32_t columnwise_order,
                        uintptr_t rowwise_scale_inv, uintptr_t columnwise_scale_inv, int32_t output_dtype,
                        uintptr_t stream);

    /* amax, compute_scale and quantize in one: current scaling (A1, S1-S4, C1-C5). As quantize, but
       scale, amax           (optional)            fp32 [1], overwritten with what was found
       epsilon                                     floor of amax (S1), 0 or more, finite
       flags                                       TE_HAL_FLAG_POWER_OF_2
       workspace                                   op QUANTIZE, mode TENSOR_CURRENT */
    int32_t (*quantize_current)(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, uintptr_t scale,
                                uintptr_t amax, double epsilon, uint32_t flags, uintptr_t rowwise_data,
                                uintptr_t columnwise_data, int32_t columnwise_order, uintptr_t rowwise_scale_inv,
                                uintptr_t columnwise_scale_inv, int32_t output_dtype, uintptr_t workspace,
                                int64_t workspace_size, uintptr_t stream);

    /* Cast with a scale per block, found from the block's amax (A1, S1-S4 with the input dtype's largest finite number
       for an overflowing quotient, C1-C5). MXFP8: the block's scale_inv is amax * (1 / fp8_max), a product in fp32,
       rounded up to a power of two (0 becomes 2^-127, infinity 2^127); codes are those of input / scale_inv.
       MTFP8: scale_inv is max(amax, 1e-15) * (1 / fp8_max); codes are those of input / scale_inv, one division (T2).
       mode                                        TE_HAL_MODE_BLOCK_1X128, _BLOCK_128X128, _MXFP8, _MTFP8_1X128 or
                                                   _MTFP8_128X128
       epsilon                                     floor of amax, 0 or more, finite; 0 for MXFP8 and MTFP8
       flags                                       TE_HAL_FLAG_POWER_OF_2 (for the first two modes alone)
       rowwise_data, columnwise_data (optional)    as in quantize
       ..._scale_inv                               given exactly if the copy is: fp32, or E8M0 bytes for MXFP8. The
                                                   scale_inv of block (i, j) lies at i * row_stride + j * col_stride,
                                                   in elements; strides are 1 or more, and what lies between is not
                                                   touched. i counts blocks down the rows of [rows, cols], j along
                                                   them: rowwise 1x128 has i < rows, j < ceil(cols / 128), columnwise
                                                   i < ceil(rows / 128), j < cols, in either columnwise_order.
       Blocks at the edges are shorter. */
    int32_t (*quantize_blocks)(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, int32_t mode,
                               double epsilon, uint32_t flags, uintptr_t rowwise_data, uintptr_t rowwise_scale_inv,
                               int64_t rowwise_scale_row_stride, int64_t rowwise_scale_col_stride,
                               uintptr_t columnwise_data, uintptr_t columnwise_scale_inv,
                               int64_t columnwise_scale_row_stride, int64_t columnwise_scale_col_stride,
                               int32_t columnwise_order, int32_t output_dtype, uintptr_t stream);

    /* output[rows, cols] = decode(data) * scale_inv in fp32, rounded once (C6).
       copy                                        te_hal_copy that `data` is of
       mode                                        any but NONE and those of NVFP4, which have an entry of their own;
                                                   TENSOR and TENSOR_CURRENT are the same here
       scale_row_stride, scale_col_stride          as in quantize_blocks; 0 for per-tensor modes */
    int32_t (*dequantize)(uintptr_t data, int32_t data_dtype, int64_t rows, int64_t cols, int32_t copy, int32_t mode,
                          uintptr_t scale_inv, int64_t scale_row_stride, int64_t scale_col_stride, uintptr_t output,
                          int32_t output_dtype, uintptr_t stream);

    /* ---- amax and scales ---- */

    /* *amax = max|input|, NaN ignored, 0 without elements (A1).
       flags                                       TE_HAL_FLAG_ACCUMULATE: *amax = max(*amax, max|input|)
       workspace                                   op AMAX, rows = count, cols = 1 */
    int32_t (*amax)(uintptr_t input, int32_t input_dtype, int64_t count, uintptr_t amax, uint32_t flags,
                    uintptr_t workspace, int64_t workspace_size, uintptr_t stream);

    /* scale[i] from amax[i] for i < count (S1-S4), and scale_inv[i] = 1 / scale[i]. `scale` may be `amax`.
       fp8_max                                     largest finite magnitude of the format, above 0, finite
       epsilon                                     floor of amax, 0 or more, finite
       value_for_inf                               what an overflowing quotient becomes; above 0, finite
       flags                                       TE_HAL_FLAG_POWER_OF_2
       scale_inv             (optional)            fp32 [count] */
    int32_t (*compute_scale)(uintptr_t amax, uintptr_t scale, uintptr_t scale_inv, int64_t count, double fp8_max,
                             double epsilon, double value_for_inf, uint32_t flags, uintptr_t stream);

    /* Roll an amax history and renew its scales, in place (D1-D4).
       amax_history                                fp32 [length, count]; row 0 is the running amax
       scale                                       fp32 [count]
       reduced_amax          (optional)            fp32 [count]; may be row 0 of amax_history
       fp8_max                                     largest finite magnitude of the format, above 0, finite
       margin                                      -100 to 100; the scale is divided by 2^margin
       algo                                        te_hal_amax_algo */
    int32_t (*update_delayed_scale)(uintptr_t amax_history, uintptr_t scale, uintptr_t reduced_amax, int64_t length,
                                    int64_t count, double fp8_max, int32_t margin, int32_t algo, uintptr_t stream);

    /* update_delayed_scale for `groups` histories at once, each with its own shape and format. The arrays are in host
       memory, `groups` long, and read before the call returns.
       reduced_amaxes        (optional)            NULL: none of the groups has one; single ones may be 0
       What one group writes must not overlap what another one reads or writes. */
    int32_t (*update_delayed_scales)(int32_t groups, const uintptr_t *amax_histories, const uintptr_t *scales,
                                     const uintptr_t *reduced_amaxes, const int64_t *lengths, const int64_t *counts,
                                     const double *fp8_maxima, int32_t margin, int32_t algo, uintptr_t stream);

    /* ---- gemm ---- */

    /* The product that `layout` names, of operands that are plain or quantized in any pairing (G1-G4). Sizes m, n, k
       are the M, N, K of te_hal_layout.
       a_copy, b_copy                              te_hal_copy; TE_HAL_COPY_ROWWISE for plain operands
       a_mode, b_mode                              TE_HAL_MODE_NONE for plain operands
       ..._scale_inv                               given exactly if the operand is quantized, with strides as in
                                                   quantize_blocks (0 for per-tensor modes and plain operands).
                                                   NVFP4's are as in quantize_nvfp4, with strides 0; a transformed copy
                                                   is read as it is, and goes with another one
       bias                  (optional)            [n], TE_HAL_LAYOUT_FPROP only; bias_dtype is 0 without it
       out                                         fp32, fp16 or bf16
       flags                                       TE_HAL_FLAG_ACCUMULATE: add to what `out` holds
       workspace                                   op GEMM with kind layout, rows and cols those of `out` */
    int32_t (*gemm)(int32_t layout, int64_t m, int64_t n, int64_t k,
                    uintptr_t a, int32_t a_dtype, int32_t a_copy, int32_t a_mode, uintptr_t a_scale_inv,
                    int64_t a_scale_row_stride, int64_t a_scale_col_stride,
                    uintptr_t b, int32_t b_dtype, int32_t b_copy, int32_t b_mode, uintptr_t b_scale_inv,
                    int64_t b_scale_row_stride, int64_t b_scale_col_stride,
                    uintptr_t bias, int32_t bias_dtype, uintptr_t out, int32_t out_dtype, uint32_t flags,
                    uintptr_t workspace, int64_t workspace_size, uintptr_t stream);

    /* grad_bias[cols] = sum of grad_output over its rows, in fp32, rounded once (G5). workspace: op BIAS_GRAD. */
    int32_t (*bias_grad)(uintptr_t grad_output, int32_t grad_dtype, int64_t rows, int64_t cols, uintptr_t grad_bias,
                         int32_t grad_bias_dtype, uintptr_t workspace, int64_t workspace_size, uintptr_t stream);

    /* ---- norm ---- */

    /* LayerNorm or RMSNorm of each row (N1-N3).
       norm                                        te_hal_norm
       weight                                      [cols], gamma
       bias                                        [cols], beta; 0 for TE_HAL_RMSNORM
       mean                                        fp32 [rows]; 0 for TE_HAL_RMSNORM
       rstd                                        fp32 [rows]
       epsilon                                     0 or more, finite
       flags                                       TE_HAL_FLAG_ZERO_CENTERED_GAMMA
       output                                      [rows, cols], fp32, fp16 or bf16 */
    int32_t (*norm_fwd)(int32_t norm, uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols,
                        uintptr_t weight, int32_t weight_dtype, uintptr_t bias, int32_t bias_dtype, double epsilon,
                        uint32_t flags, uintptr_t output, int32_t output_dtype, uintptr_t mean, uintptr_t rstd,
                        uintptr_t stream);

    /* Gradients of norm_fwd (N4). grad_input has the input's dtype, grad_weight and grad_bias have the weight's.
       mean, grad_bias                             0 for TE_HAL_RMSNORM
       workspace                                   op NORM_BWD */
    int32_t (*norm_bwd)(int32_t norm, uintptr_t grad_output, int32_t grad_dtype, uintptr_t input, int32_t input_dtype,
                        int64_t rows, int64_t cols, uintptr_t mean, uintptr_t rstd, uintptr_t weight,
                        int32_t weight_dtype, uint32_t flags, uintptr_t grad_input, uintptr_t grad_weight,
                        uintptr_t grad_bias, uintptr_t workspace, int64_t workspace_size, uintptr_t stream);

    /* ---- softmax ---- */

    /* Scaled, masked softmax over the last dimension of [outer, inner, queries, keys] (X1-X3).
       scale                                       any number, infinite ones included
       mask                  (optional)            bytes, not 0 hides; element (o, i, q, k) lies at the sum of index
                                                   times stride over the four strides, in bytes; a stride may be 0,
                                                   and is without a mask
       causal                                      te_hal_causal
       window_left, window_right                   keys visible left and right of the diagonal; -1: all */
    int32_t (*softmax_fwd)(uintptr_t input, int32_t input_dtype, int64_t outer, int64_t inner, int64_t queries,
                           int64_t keys, double scale, uintptr_t mask, int64_t mask_outer_stride,
                           int64_t mask_inner_stride, int64_t mask_query_stride, int64_t mask_key_stride,
                           int32_t causal, int64_t window_left, int64_t window_right, uintptr_t output,
                           int32_t output_dtype, uintptr_t stream);

    /* grad_input = scale * output * (grad_output - sum(grad_output * output)), 0 where output is 0 (X4); [batches,
       queries, keys]. grad_input has the gradient's dtype. What causal and the window hide counts as 0 and need not be
       read; TE_HAL_CAUSAL_NONE and -1 are always right where the forward has left zeros. */
    int32_t (*softmax_bwd)(uintptr_t grad_output, int32_t grad_dtype, uintptr_t output, int32_t output_dtype,
                           int64_t batches, int64_t queries, int64_t keys, double scale, int32_t causal,
                           int64_t window_left, int64_t window_right, uintptr_t grad_input, uintptr_t stream);

    /* ---- activation ---- */

    /* An activation function, computed in fp32, rounded once (V1-V3).
       activation                                  te_hal_activation
       input                                       [rows, cols], gated kinds [rows, 2 * cols]
       limit, alpha, offset                        TE_HAL_CLAMPED_SWIGLU only, otherwise 0; any numbers (V3)
       output                                      [rows, cols], fp32, fp16 or bf16 */
    int32_t (*activation_fwd)(int32_t activation, uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols,
                              double limit, double alpha, double offset, uintptr_t output, int32_t output_dtype,
                              uintptr_t stream);

    /* Gradient of activation_fwd. grad_output is [rows, cols], grad_input has the input's shape. */
    int32_t (*activation_bwd)(int32_t activation, uintptr_t grad_output, int32_t grad_dtype, uintptr_t input,
                              int32_t input_dtype, int64_t rows, int64_t cols, double limit, double alpha,
                              double offset, uintptr_t grad_input, int32_t grad_input_dtype, uintptr_t stream);

    /* ---- fused with the cast of the result ----

       `mode` is TE_HAL_MODE_TENSOR or TE_HAL_MODE_TENSOR_CURRENT:
       TENSOR                                      scale is read; amax (optional) becomes max(amax, max|result|); both
                                                   see the fp32 result
       TENSOR_CURRENT                              scale and amax (optional) are overwritten with what was found;
                                                   rounded_dtype is the dtype that the result is rounded to before it
                                                   is cast, and (after a norm) before its amax is taken: F1-F3.
                                                   With TENSOR, rounded_dtype is the dtype of `plain` alone.
       scale_epsilon, TE_HAL_FLAG_POWER_OF_2       as epsilon and flag of quantize_current; 0 with TENSOR
       copies, ..._scale_inv, output_dtype         as in quantize
       workspace                                   the op's own code, mode as given */

    /* norm_fwd, then quantize (F1).
       plain                 (optional)            [rows, cols], rounded_dtype: the result before the cast */
    int32_t (*norm_quantize)(int32_t norm, uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols,
                             uintptr_t weight, int32_t weight_dtype, uintptr_t bias, int32_t bias_dtype,
                             double epsilon, uint32_t flags, uintptr_t mean, uintptr_t rstd, uintptr_t plain,
                             int32_t rounded_dtype, int32_t mode, uintptr_t scale, uintptr_t amax,
                             double scale_epsilon, uintptr_t rowwise_data, uintptr_t columnwise_data,
                             int32_t columnwise_order, uintptr_t rowwise_scale_inv, uintptr_t columnwise_scale_inv,
                             int32_t output_dtype, uintptr_t workspace, int64_t workspace_size, uintptr_t stream);

    /* activation_fwd, then quantize (F2). */
    int32_t (*activation_quantize)(int32_t activation, uintptr_t input, int32_t input_dtype, int64_t rows,
                                   int64_t cols, double limit, double alpha, double offset, int32_t rounded_dtype,
                                   int32_t mode, uintptr_t scale, uintptr_t amax, double scale_epsilon, uint32_t flags,
                                   uintptr_t rowwise_data, uintptr_t columnwise_data, int32_t columnwise_order,
                                   uintptr_t rowwise_scale_inv, uintptr_t columnwise_scale_inv, int32_t output_dtype,
                                   uintptr_t workspace, int64_t workspace_size, uintptr_t stream);

    /* activation_bwd, then quantize of the gradient (F3), which for gated kinds is [rows, 2 * cols].
       grad_bias             (optional)            the gradient's column sums: of the fp32 gradient with TENSOR, of the
                                                   rounded one with TENSOR_CURRENT */
    int32_t (*activation_bwd_quantize)(int32_t activation, uintptr_t grad_output, int32_t grad_dtype, uintptr_t input,
                                       int32_t input_dtype, int64_t rows, int64_t cols, double limit, double alpha,
                                       double offset, int32_t rounded_dtype, uintptr_t grad_bias,
                                       int32_t grad_bias_dtype, int32_t mode, uintptr_t scale, uintptr_t amax,
                                       double scale_epsilon, uint32_t flags, uintptr_t rowwise_data,
                                       uintptr_t columnwise_data, int32_t columnwise_order,
                                       uintptr_t rowwise_scale_inv, uintptr_t columnwise_scale_inv,
                                       int32_t output_dtype, uintptr_t workspace, int64_t workspace_size,
                                       uintptr_t stream);

    /* bias_grad and quantize of one gradient, which is read once. No rounding in between: the gradient is given. */
    int32_t (*bias_grad_quantize)(uintptr_t grad_output, int32_t grad_dtype, int64_t rows, int64_t cols,
                                  uintptr_t grad_bias, int32_t grad_bias_dtype, int32_t mode, uintptr_t scale,
                                  uintptr_t amax, double scale_epsilon, uint32_t flags, uintptr_t rowwise_data,
                                  uintptr_t columnwise_data, int32_t columnwise_order, uintptr_t rowwise_scale_inv,
                                  uintptr_t columnwise_scale_inv, int32_t output_dtype, uintptr_t workspace,
                                  int64_t workspace_size, uintptr_t stream);

    /* ---- since version 2: a product whose bias comes after it, in fp32 ---- */

    /* An activation function of input + bias, computed in fp32, rounded once (F4).
       activation                                  te_hal_activation, not gated
       input                                       [rows, cols], fp32, fp16 or bf16
       bias                                        [cols], fp32, fp16 or bf16
       output                                      [rows, cols], fp32, fp16 or bf16 */
    int32_t (*bias_activation_fwd)(int32_t activation, uintptr_t input, int32_t input_dtype, int64_t rows,
                                   int64_t cols, uintptr_t bias, int32_t bias_dtype, uintptr_t output,
                                   int32_t output_dtype, uintptr_t stream);

    /* Gradient of bias_activation_fwd. grad_output and grad_input are [rows, cols].
       grad_bias             (optional)            [cols]: the sum over rows of the fp32 gradient
       workspace                                   TE_HAL_OP_BIAS_ACTIVATION_BWD; 0 and 0 without grad_bias */
    int32_t (*bias_activation_bwd)(int32_t activation, uintptr_t grad_output, int32_t grad_dtype, uintptr_t input,
                                   int32_t input_dtype, int64_t rows, int64_t cols, uintptr_t bias,
                                   int32_t bias_dtype, uintptr_t grad_input, int32_t grad_input_dtype,
                                   uintptr_t grad_bias, int32_t grad_bias_dtype, uintptr_t workspace,
                                   int64_t workspace_size, uintptr_t stream);

    /* residual + (input + bias), both sums in fp32, rounded once (G6). All but bias are [rows, cols]. */
    int32_t (*bias_residual)(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, uintptr_t bias,
                             int32_t bias_dtype, uintptr_t residual, int32_t residual_dtype, uintptr_t output,
                             int32_t output_dtype, uintptr_t stream);

    /* ---- NVFP4 ---- */

    /* Cast to NVFP4 (A1, NV1-NV6); rows and cols are multiples of 16. Since version 3.
       mode                                        TE_HAL_MODE_NVFP4, _NVFP4_16X16, or _NVFP4_HADAMARD, whose input is
                                                   bf16 where a columnwise copy is wanted
       flags                                       TE_HAL_FLAG_BY_CHANCE (not with squares)
       seed_low, seed_high                         halves of the seed; 0 without the flag
       rowwise_data          (optional)            [rows, cols / 2] bytes of two codes; at least one copy is wanted
       columnwise_data       (optional)            [cols, rows / 2], transposed always
       ..._scale_inv                               given exactly if the copy is: E4M3 bytes, then the fp32 amax of what
                                                   was cast, at a multiple of 4 in address. Rowwise the bytes are
                                                   [rows up to a multiple of 128, cols / 16 up to a multiple of 4],
                                                   columnwise [cols up to ..., rows / 16 up to ...]; those beyond the
                                                   tensor are not touched. A square's scale is there once per line
       workspace                                   op QUANTIZE, the same mode */
    int32_t (*quantize_nvfp4)(uintptr_t input, int32_t input_dtype, int64_t rows, int64_t cols, int32_t mode,
                              uint32_t flags, uint32_t seed_low, uint32_t seed_high, uintptr_t rowwise_data,
                              uintptr_t rowwise_scale_inv, uintptr_t columnwise_data, uintptr_t columnwise_scale_inv,
                              uintptr_t workspace, int64_t workspace_size, uintptr_t stream);

    /* What a copy of quantize_nvfp4 stands for, rounded once (NV7); a transformed one is transformed back. Since
       version 3.
       copy                                        TE_HAL_COPY_ROWWISE or TE_HAL_COPY_COLUMNWISE_TRANSPOSED
       scale_inv                                   as in quantize_nvfp4
       flags                                       TE_HAL_FLAG_UNSCALED: code times the block's scale, which every dtype
                                                   holds exactly; what is transformed stays so (NV8)
       output                                      [rows, cols], fp32, fp16 or bf16 */
    int32_t (*dequantize_nvfp4)(uintptr_t data, int64_t rows, int64_t cols, int32_t copy, int32_t mode,
                                uintptr_t scale_inv, uint32_t flags, uintptr_t output, int32_t output_dtype,
                                uintptr_t stream);
} te_hal_api;

/* ------------------------------------------------------------------------------------------------------- entry -- */

/*
 * The exported symbol. NULL: the library needs a caller that knows more than `highest_abi_version`. The table may be
 * newer than the caller; it stays usable, because it only grows at the end.
 */
const te_hal_api *te_hal_get_api(uint32_t highest_abi_version);

typedef const te_hal_api *(*te_hal_get_api_function)(uint32_t highest_abi_version);

#define TE_HAL_GET_API_NAME "te_hal_get_api"

/* Bytes of a table up to the end of an entry, and whether a table reaches that far and has the entry. */
#define TE_HAL_SIZE_TO(entry) (offsetof(te_hal_api, entry) + sizeof(((te_hal_api *)0)->entry))
#define TE_HAL_HAS(api, entry) ((api)->struct_size >= TE_HAL_SIZE_TO(entry) && (api)->entry != NULL)

/* struct_size of this version's table. Whoever adds an entry moves the name here and the number below. */
#define TE_HAL_API_SIZE TE_HAL_SIZE_TO(dequantize_nvfp4)

typedef char te_hal_api_ends_with_the_named_entry[TE_HAL_API_SIZE == sizeof(te_hal_api) ? 1 : -1];
typedef char te_hal_api_has_39_pointers[TE_HAL_API_SIZE == 8 + 39 * sizeof(void *) ? 1 : -1];

#ifdef __cplusplus
}
#endif

#endif
