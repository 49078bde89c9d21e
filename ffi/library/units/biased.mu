// A unit of the library: what is done with a product whose bias comes after it.

#include "../first.h"

#include "../../kernels/biased.mu"
#include "../units.h"

void te::add_biased_entries(te_hal_api& api) {
    api.bias_activation_fwd = &Guard<&bias_activation_fwd>::call;
    api.bias_activation_bwd = &Guard<&bias_activation_bwd>::call;
    api.bias_residual = &Guard<&bias_residual>::call;
}
