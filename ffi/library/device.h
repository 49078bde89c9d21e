// Devices: what they are, whether this library can run on them, and which FP8 encoder is in force on each.
#pragma once

#include "../kernels/fp8.muh"
#include "launch.h"

namespace te {

constexpr int kMostDevices = 64;

// The encoder in force per device; read at every launch of a cast, written by select_fp8_encoder alone.
inline bool& instruction_in_force(int device) {
    static bool in_force[kMostDevices] = {};
    return in_force[device];
}

#if TE_TARGET_HOST
inline int current_device() {
    return 0;
}
#else
inline int current_device() {
    int device = 0;
    return TE_RUNTIME(GetDevice)(&device) == TE_RUNTIME(Success) ? device : 0;
}
#endif

inline EncoderChoice encoder_choice() {
#if TE_TARGET_HOST
    return {false};
#else
    const int device = current_device();
    return {device >= 0 && device < kMostDevices && __atomic_load_n(&instruction_in_force(device), __ATOMIC_RELAXED)};
#endif
}

}  // namespace te
