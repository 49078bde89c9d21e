// The part of MUSA's FP8 header that the kernels use. Its functions do not follow the pattern of the other names.
#pragma once

typedef unsigned short __mt_fp8x2_storage_t;
enum __mt_saturation_t { __MT_NOSAT, __MT_SATFINITE };
enum __mt_fp8_interpretation_t { __MT_E4M3, __MT_E5M2 };
__device__ __mt_fp8x2_storage_t __musa_cvt_float2_to_fp8x2(float2, __mt_saturation_t, __mt_fp8_interpretation_t);
