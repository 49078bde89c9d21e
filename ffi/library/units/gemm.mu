// A unit of the library: matrix products.

#include "../first.h"

#include "../../kernels/gemm.mu"
#include "../units.h"

void te::add_gemm_entries(te_hal_api& api) {
    api.gemm = &Guard<&gemm>::call;
}
