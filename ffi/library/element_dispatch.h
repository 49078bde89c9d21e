// From dtype codes to element types: call a function template's instance for the type that a checked code names.
#pragma once

#include "../include/te_hal.h"
#include "../kernels/fp8.muh"

namespace te {

inline int64_t bytes_of_dtype(int32_t dtype) {
    switch (dtype) {
        case TE_HAL_FLOAT32:
            return 4;
        case TE_HAL_FLOAT16:
        case TE_HAL_BFLOAT16:
            return 2;
        default:
            return 1;
    }
}

// function(Float32{}), function(Float16{}) or function(BFloat16{}).
template <class Function>
int32_t with_plain_type(int32_t dtype, const Function& function) {
    switch (dtype) {
        case TE_HAL_FLOAT32:
            return function(Float32{});
        case TE_HAL_FLOAT16:
            return function(Float16{});
        default:
            return function(BFloat16{});
    }
}

// function(E4M3{}) or function(E5M2{}).
template <class Function>
int32_t with_fp8_type(int32_t dtype, const Function& function) {
    return dtype == TE_HAL_FLOAT8_E4M3 ? function(E4M3{}) : function(E5M2{});
}

// function(True{}) or function(False{}), for a template's bool.
struct True {
    static constexpr bool value = true;
};
struct False {
    static constexpr bool value = false;
};
template <class Function>
int32_t with_bool(bool condition, const Function& function) {
    return condition ? function(True{}) : function(False{});
}

}  // namespace te
