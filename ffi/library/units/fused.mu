// A unit of the library: what is fused with a cast, and bias gradients.

#include "../first.h"

#include "../../kernels/activation_quantize.mu"
#include "../../kernels/bias_grad.mu"
#include "../../kernels/norm_quantize.mu"
#include "../units.h"

void te::add_fused_entries(te_hal_api& api) {
    api.norm_quantize = &Guard<&norm_quantize>::call;
    api.activation_quantize = &Guard<&activation_quantize>::call;
    api.activation_bwd_quantize = &Guard<&activation_bwd_quantize>::call;
    api.bias_grad = &Guard<&bias_grad>::call;
    api.bias_grad_quantize = &Guard<&bias_grad_quantize>::call;
}
