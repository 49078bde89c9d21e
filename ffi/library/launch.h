// Launching a kernel. This is the only place that knows how each target does it.
#pragma once

#include "../kernels/portable.muh"
#include "error.h"

namespace te {

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Of 0 or more; no sum that could overflow.
inline int64_t ceil_divide(int64_t dividend, int64_t divisor) {
    return dividend / divisor + (dividend % divisor != 0 ? 1 : 0);
}
inline int64_t smaller_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

inline bool is_multiple(int64_t value, int64_t of) {
    return value % of == 0;
}
inline bool is_aligned(uintptr_t address, uintptr_t to) {
    return address % to == 0;
}

inline int32_t refuse_grid(int64_t blocks) {
    return fail(TE_HAL_SIZE_OVERFLOW, "the sizes need %lld blocks; accepted: 1 to %lld", static_cast<long long>(blocks),
                static_cast<long long>(kMaxBlocks));
}

#if TE_TARGET_HOST

inline int32_t status_of(emulator::Outcome outcome) {
    switch (outcome) {
        case emulator::Outcome::kDone:
            return TE_HAL_OK;
        case emulator::Outcome::kOutOfMemory:
            return fail(TE_HAL_OUT_OF_MEMORY, "%s", emulator::last_fault());
        case emulator::Outcome::kMisconfigured:
            return fail(TE_HAL_INVALID_ARGUMENT, "%s", emulator::last_fault());
        default:
            return fail(TE_HAL_KERNEL_FAULT, "%s", emulator::last_fault());
    }
}

// Run `kernel` on `blocks` blocks. Arguments are converted to the kernel's parameters once, here.
template <class... Parameters, class... Given>
int32_t launch(int64_t blocks, uintptr_t, void (*kernel)(Parameters...), Given... given) {
    if (blocks < 1 || blocks > kMaxBlocks) return refuse_grid(blocks);
    return [&](const Parameters... arguments) {
        return status_of(emulator::launch(blocks, kThreads, [&] { kernel(arguments...); }));
    }(static_cast<Parameters>(given)...);
}

#else

inline int32_t check_runtime(TE_RUNTIME(Error_t) error) {
    if (error == TE_RUNTIME(Success)) return TE_HAL_OK;
    const int number = static_cast<int>(error);
    const char* const text = TE_RUNTIME(GetErrorString)(error);
    switch (number) {  // the numbers of both runtimes
        case 2:
            return fail(TE_HAL_OUT_OF_MEMORY, "device runtime: %s (error 2)", text);
        case 98:
        case 209:
            return fail(TE_HAL_WRONG_ARCHITECTURE, "device runtime: %s (error %d)", text, number);
        case 35:
        case 100:
        case 101:
            return fail(TE_HAL_NO_DEVICE, "device runtime: %s (error %d)", text, number);
        default:
            return fail(TE_HAL_DEVICE_ERROR, "device runtime: %s (error %d); it may come from earlier work", text,
                        number);
    }
}

// Run `kernel` on `blocks` blocks in the stream. Checked here because an oversized launch kills the process on mp_22.
template <class... Parameters, class... Given>
int32_t launch(int64_t blocks, uintptr_t stream, void (*kernel)(Parameters...), Given... given) {
    if (blocks < 1 || blocks > kMaxBlocks) return refuse_grid(blocks);
    kernel<<<dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, reinterpret_cast<TE_RUNTIME(Stream_t)>(stream)>>>(
        static_cast<Parameters>(given)...);
    return check_runtime(TE_RUNTIME(GetLastError)());
}

#endif

}  // namespace te
