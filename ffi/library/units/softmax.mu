// A unit of the library: softmax.

#include "../first.h"

#include "../../kernels/softmax.mu"
#include "../../kernels/softmax_backward.mu"
#include "../units.h"

void te::add_softmax_entries(te_hal_api& api) {
    api.softmax_fwd = &Guard<&softmax_fwd>::call;
    api.softmax_bwd = &Guard<&softmax_bwd>::call;
}
