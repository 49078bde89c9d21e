// A unit of the library: activations.

#include "../first.h"

#include "../../kernels/activation.mu"
#include "../units.h"

void te::add_activation_entries(te_hal_api& api) {
    api.activation_fwd = &Guard<&activation_fwd>::call;
    api.activation_bwd = &Guard<&activation_bwd>::call;
}
