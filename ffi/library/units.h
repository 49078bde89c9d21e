// The units of a library, which are compiled apart and at the same time. Each adds its entries to the table.
#pragma once

#include "error.h"

namespace te {

void add_cast_entries(te_hal_api& api);
void add_gemm_entries(te_hal_api& api);
void add_norm_entries(te_hal_api& api);
void add_softmax_entries(te_hal_api& api);
void add_activation_entries(te_hal_api& api);
void add_fused_entries(te_hal_api& api);
void add_biased_entries(te_hal_api& api);
void add_nvfp4_entries(te_hal_api& api);

}  // namespace te
