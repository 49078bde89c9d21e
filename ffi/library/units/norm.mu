// A unit of the library: norms.

#include "../first.h"

#include "../../kernels/norm.mu"
#include "../../kernels/norm_backward_entry.mu"
#include "../units.h"

void te::add_norm_entries(te_hal_api& api) {
    api.norm_fwd = &Guard<&norm_fwd>::call;
    api.norm_bwd = &Guard<&norm_bwd>::call;
}
