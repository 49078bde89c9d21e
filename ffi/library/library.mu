// The table of a kernel library, and the entries that are about the library itself. Its exported symbol hands it out.

#include "first.h"

#include "device_entries.mu"
#include "supports.mu"
#include "units.h"

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
    add_cast_entries(api);
    add_gemm_entries(api);
    add_norm_entries(api);
    add_softmax_entries(api);
    add_activation_entries(api);
    add_fused_entries(api);
    add_biased_entries(api);
    add_nvfp4_entries(api);
    return api;
}

}  // namespace
}  // namespace te

extern "C" __attribute__((visibility("default"))) const te_hal_api* te_hal_get_api(uint32_t highest_abi_version) {
    static const te_hal_api api = te::make_api();
    // Version 1 is the lowest there is; whoever knows it can use this table.
    return highest_abi_version >= 1 ? &api : nullptr;
}
