// A unit of the library: casts, amax and scales.

#include "../first.h"

#include "../../kernels/amax.mu"
#include "../../kernels/block_entries.mu"
#include "../../kernels/cast_entries.mu"
#include "../../kernels/delayed_scale.mu"
#include "../../kernels/transpose.mu"
#include "../units.h"

void te::add_cast_entries(te_hal_api& api) {
    api.transpose = &Guard<&transpose>::call;
    api.quantize = &Guard<&quantize>::call;
    api.quantize_current = &Guard<&quantize_current>::call;
    api.quantize_blocks = &Guard<&quantize_blocks>::call;
    api.dequantize = &Guard<&dequantize>::call;
    api.amax = &Guard<&amax>::call;
    api.compute_scale = &Guard<&compute_scale>::call;
    api.update_delayed_scale = &Guard<&update_delayed_scale>::call;
    api.update_delayed_scales = &Guard<&update_delayed_scales>::call;
}
