// A unit of the library: casts to and from NVFP4.

#include "../first.h"

#include "../../kernels/nvfp4_entries.mu"
#include "../units.h"

void te::add_nvfp4_entries(te_hal_api& api) {
    api.quantize_nvfp4 = &Guard<&quantize_nvfp4>::call;
    api.dequantize_nvfp4 = &Guard<&dequantize_nvfp4>::call;
}
