// A kernel library, whole: the one source that is compiled for a device. Its exported symbol hands out the table.

// Before any device header: an old mublas-types.h redefines a word that libstdc++ uses.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../include/te_hal.h"
#include "../kernels/activation.mu"
#include "../kernels/activation_quantize.mu"
#include "../kernels/amax.mu"
#include "../kernels/bias_grad.mu"
#include "../kernels/block_entries.mu"
#include "../kernels/cast_entries.mu"
#include "../kernels/delayed_scale.mu"
#include "../kernels/gemm.mu"
#include "../kernels/norm.mu"
#include "../kernels/norm_backward.mu"
#include "../kernels/norm_quantize.mu"
#include "../kernels/softmax.mu"
#include "../kernels/softmax_backward.mu"
#include "../kernels/transpose.mu"
#include "device_entries.mu"
#include "supports.mu"

// Set by te_hal.ffi.build.
#if !defined(TE_VERSION)
    #define TE_VERSION "unknown"
#endif
#if !defined(TE_SOURCE_HASH)
    #define TE_SOURCE_HASH "unknown"
#endif
#if !defined(TE_COMPILER)
    #define TE_COMPILER "unknown"
#endif

namespace te {
namespace {

#if TE_TARGET_MUSA
constexpr char kBackend[] = "musa";
#elif TE_TARGET_CUDA
constexpr char kBackend[] = "cuda";
#else
constexpr char kBackend[] = "host";
#endif

te_hal_api make_api() {
    te_hal_api api = {};
    api.struct_size = TE_HAL_API_SIZE;
    api.abi_version = TE_HAL_ABI_VERSION;
    api.backend = kBackend;
    api.architectures = TE_ARCHITECTURES;
    api.version = TE_VERSION;
    api.source_hash = TE_SOURCE_HASH;
    api.compiler = TE_COMPILER;
    api.last_error = &last_error;
    api.device_count = &Guard<&device_count>::call;
    api.device_info = &Guard<&device_info>::call;
    api.check_device = &Guard<&check_device>::call;
    api.select_fp8_encoder = &Guard<&select_fp8_encoder>::call;
#if TE_TARGET_HOST
    api.configure_emulator = &Guard<&configure_emulator>::call;
#endif
    api.supports = &Guard<&supports>::call;
    api.workspace_bytes = &Guard<&workspace_bytes>::call;
    api.transpose = &Guard<&transpose>::call;
    api.quantize = &Guard<&quantize>::call;
    api.quantize_current = &Guard<&quantize_current>::call;
    api.quantize_blocks = &Guard<&quantize_blocks>::call;
    api.dequantize = &Guard<&dequantize>::call;
    api.amax = &Guard<&amax>::call;
    api.compute_scale = &Guard<&compute_scale>::call;
    api.update_delayed_scale = &Guard<&update_delayed_scale>::call;
    api.update_delayed_scales = &Guard<&update_delayed_scales>::call;
    api.gemm = &Guard<&gemm>::call;
    api.bias_grad = &Guard<&bias_grad>::call;
    api.norm_fwd = &Guard<&norm_fwd>::call;
    api.norm_bwd = &Guard<&norm_bwd>::call;
    api.softmax_fwd = &Guard<&softmax_fwd>::call;
    api.softmax_bwd = &Guard<&softmax_bwd>::call;
    api.activation_fwd = &Guard<&activation_fwd>::call;
    api.activation_bwd = &Guard<&activation_bwd>::call;
    api.norm_quantize = &Guard<&norm_quantize>::call;
    api.activation_quantize = &Guard<&activation_quantize>::call;
    api.activation_bwd_quantize = &Guard<&activation_bwd_quantize>::call;
    api.bias_grad_quantize = &Guard<&bias_grad_quantize>::call;
    return api;
}

}  // namespace
}  // namespace te

extern "C" __attribute__((visibility("default"))) const te_hal_api* te_hal_get_api(uint32_t highest_abi_version) {
    static const te_hal_api api = te::make_api();
    // Version 1 is the lowest there is; whoever knows it can use this table.
    return highest_abi_version >= 1 ? &api : nullptr;
}
