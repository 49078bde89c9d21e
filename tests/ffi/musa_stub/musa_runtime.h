// A stand-in for the MUSA headers, for clang 14 posing as mcc, which is built from that version of clang. It declares
// only names that MUSA's documentation or published MUSA code has; a name that only CUDA has is a compile error.
#pragma once

#include <stddef.h>

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((launch_bounds(threads)))

struct dim3 {
    unsigned x, y, z;
    __host__ __device__ constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct float2 {
    float x, y;
};
__device__ inline float2 make_float2(float a, float b) {
    float2 pair;
    pair.x = a;
    pair.y = b;
    return pair;
}

// ---- runtime ----

typedef struct MUstream_st* musaStream_t;
enum musaError_t { musaSuccess = 0 };
enum musaMemcpyKind { musaMemcpyHostToDevice = 1, musaMemcpyDeviceToHost = 2 };
struct musaDeviceProp {
    char name[256];
    size_t sharedMemPerBlock;
    int warpSize;
    int major;
    int minor;
    int multiProcessorCount;
};
enum musaDeviceAttr { musaDevAttrMultiProcessorCount = 16 };
struct musaFuncAttributes {
    int numRegs;
};
extern "C" {
musaError_t musaGetLastError();
const char* musaGetErrorString(musaError_t);
musaError_t musaGetDeviceCount(int*);
musaError_t musaGetDevice(int*);
musaError_t musaSetDevice(int);
musaError_t musaGetDeviceProperties(musaDeviceProp*, int);
musaError_t musaDeviceGetAttribute(int*, musaDeviceAttr, int);
musaError_t musaFuncGetAttributes(musaFuncAttributes*, const void*);
musaError_t musaMalloc(void**, size_t);
musaError_t musaFree(void*);
musaError_t musaMemcpy(void*, const void*, size_t, musaMemcpyKind);
musaError_t musaStreamSynchronize(musaStream_t);

// What clang itself calls for a launch: the first in the host pass, the second is looked for in the device pass.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t = 0, musaStream_t = 0);
int cudaConfigureCall(dim3, dim3, size_t = 0, musaStream_t = 0);
musaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, musaStream_t);
}

// ---- device ----

struct StubIndex {
    unsigned x, y, z;
};
extern const __device__ __attribute__((weak)) StubIndex threadIdx, blockIdx, gridDim;

__device__ void __syncthreads() __attribute__((convergent));
__device__ int __shfl_xor_sync(unsigned, int, int, int) __attribute__((convergent));
__device__ unsigned __shfl_xor_sync(unsigned, unsigned, int, int) __attribute__((convergent));
__device__ float __shfl_xor_sync(unsigned, float, int, int) __attribute__((convergent));
__device__ unsigned __float_as_uint(float);
__device__ float __uint_as_float(unsigned);
__device__ float __fdiv_rn(float, float);
__device__ unsigned atomicCAS(unsigned*, unsigned, unsigned);
__device__ float atomicAdd(float*, float);
extern "C" {
__device__ float sqrtf(float);
__device__ float fmaxf(float, float);
__device__ float fminf(float, float);
__device__ float fabsf(float);
__device__ float floorf(float);
__device__ float rintf(float);
__device__ float expf(float);
__device__ float exp2f(float);
__device__ float log2f(float);
}
