// How many blocks a device can hold: kernels whose blocks live through all rows ask.
#pragma once

#include "device.h"

namespace te {

// Multiprocessors of the current device. On the host a small number, so that blocks have several rows there too.
#if TE_TARGET_HOST
inline int64_t multiprocessors() {
    return 3;
}
#else
inline int64_t multiprocessors() {
    static int known[kMostDevices] = {};
    const int device = current_device();
    const bool has_place = device >= 0 && device < kMostDevices;
    int count = has_place ? __atomic_load_n(&known[device], __ATOMIC_RELAXED) : 0;
    if (count > 0) return count;
    const auto error = TE_RUNTIME(DeviceGetAttribute)(&count, TE_RUNTIME(DevAttrMultiProcessorCount), device);
    if (error != TE_RUNTIME(Success) || count < 1) return 1;
    if (has_place) __atomic_store_n(&known[device], count, __ATOMIC_RELAXED);
    return count;
}
#endif

}  // namespace te
