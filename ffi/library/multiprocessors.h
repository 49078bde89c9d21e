// How many blocks a device can hold: kernels whose blocks live through all rows ask.
#pragma once

#include <atomic>

#include "device.h"

namespace te {

// Multiprocessors of the current device. On the host a small number, so that blocks have several rows there too.
#if TE_TARGET_HOST
inline int64_t multiprocessors() {
    return 3;
}
#else
inline int64_t multiprocessors() {
    static std::atomic<int> known[kMostDevices] = {};
    const int device = current_device();
    const bool has_place = device >= 0 && device < kMostDevices;
    int count = has_place ? known[device].load(std::memory_order_relaxed) : 0;
    if (count > 0) return count;
    if (TE_RUNTIME(DeviceGetAttribute)(&count, TE_RUNTIME(DevAttrMultiProcessorCount), device) != TE_RUNTIME(Success) ||
        count < 1) {
        count = 1;
    }
    if (has_place) known[device].store(count, std::memory_order_relaxed);
    return count;
}
#endif

}  // namespace te
