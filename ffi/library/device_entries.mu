// The entries about devices: device_count, device_info, check_device, select_fp8_encoder, configure_emulator.
#pragma once

#include "arguments.h"
#include "device.h"
#if TE_TARGET_HOST
    #include "../emulator/configuration.h"
#else
    #include "../kernels/fp8_agreement.mu"
#endif

// Set by te_hal.ffi.build.
#if !defined(TE_ARCHITECTURES)
    #define TE_ARCHITECTURES "unknown"
#endif

namespace te {

#if TE_TARGET_HOST

inline int32_t device_count(int32_t* count) {
    Arguments arguments("device_count");
    const int32_t status = arguments.require(count != nullptr, "count is null").status();
    if (status == TE_HAL_OK) *count = 1;
    return status;
}

inline int32_t refuse_device(int32_t device) {
    return device == 0 ? TE_HAL_OK : fail(TE_HAL_NO_DEVICE, "device %d; accepted: 0, the host emulation", device);
}

inline int32_t check_device(int32_t device) {
    Arguments("check_device");
    return refuse_device(device);
}

inline int32_t describe_device(int32_t device, te_hal_device_info& info) {
    if (device != 0) return refuse_device(device);
    info.multiprocessors = emulator::worker_count();
    info.wave = emulator::configuration().wave;
    info.shared_memory_per_block = static_cast<int64_t>(emulator::kSharedMemory);
    snprintf(info.name, sizeof info.name, "host emulation");
    return TE_HAL_OK;
}

inline int32_t select_fp8_encoder(int32_t instruction, int64_t* mismatches, uintptr_t) {
    Arguments arguments("select_fp8_encoder");
    arguments.code("instruction", instruction, 0, 2).require(mismatches != nullptr, "mismatches is null");
    arguments.unsupported_if(instruction != 0, "the host emulation has no FP8 instruction");
    const int32_t status = arguments.status();
    if (status == TE_HAL_OK) *mismatches = 0;
    return status;
}

inline int32_t configure_emulator(int32_t threads, int32_t wave, int64_t seed) {
    Arguments("configure_emulator");
    if (emulator::configure(threads, wave, seed)) return TE_HAL_OK;
    return fail(TE_HAL_INVALID_ARGUMENT, "threads %d, wave %d; accepted: threads 0 to 256, wave 32 or 128", threads,
                wave);
}

#else

inline int32_t device_count(int32_t* count) {
    Arguments arguments("device_count");
    const int32_t status = arguments.require(count != nullptr, "count is null").status();
    if (status != TE_HAL_OK) return status;
    *count = 0;
    int found = 0;
    if (TE_RUNTIME(GetDeviceCount)(&found) == TE_RUNTIME(Success) && found > 0) {
        *count = found;
        return TE_HAL_OK;
    }
    const char* const text = TE_RUNTIME(GetErrorString)(TE_RUNTIME(GetLastError)());
    return fail(TE_HAL_NO_DEVICE, "no device that the driver and this process can use (%s)", text);
}

inline int32_t properties_of(int32_t device, TE_RUNTIME(DeviceProp) & properties) {
    int32_t count = 0;
    const char* const op = last_error_of_thread().op;
    const int32_t status = device_count(&count);
    last_error_of_thread().op = op;
    if (status != TE_HAL_OK) return status;
    if (device < 0 || device >= count) {
        return fail(TE_HAL_NO_DEVICE, "device %d; accepted: 0 to %d", device, count - 1);
    }
    return check_runtime(TE_RUNTIME(GetDeviceProperties)(&properties, device));
}

inline int32_t check_device(int32_t device) {
    Arguments("check_device");
    TE_RUNTIME(DeviceProp) properties;
    int32_t status = properties_of(device, properties);
    if (status != TE_HAL_OK) return status;
    const int before = current_device();
    status = check_runtime(TE_RUNTIME(SetDevice)(device));
    if (status != TE_HAL_OK) return status;
    TE_RUNTIME(FuncAttributes) attributes;
    const auto found =
        TE_RUNTIME(FuncGetAttributes)(&attributes, reinterpret_cast<const void*>(&count_fp8_disagreements));
    TE_RUNTIME(GetLastError)();
    TE_RUNTIME(SetDevice)(before);
    if (found == TE_RUNTIME(Success)) return TE_HAL_OK;
    return fail(TE_HAL_WRONG_ARCHITECTURE,
                "device %d is a %s of architecture %d.%d; this library holds code for %s (%s)", device, properties.name,
                properties.major, properties.minor, TE_ARCHITECTURES, TE_RUNTIME(GetErrorString)(found));
}

inline int32_t describe_device(int32_t device, te_hal_device_info& info) {
    TE_RUNTIME(DeviceProp) properties;
    const int32_t status = properties_of(device, properties);
    if (status != TE_HAL_OK) return status;
    info.architecture = properties.major * 10 + properties.minor;
    info.multiprocessors = properties.multiProcessorCount;
    info.wave = properties.warpSize;
    info.shared_memory_per_block = static_cast<int64_t>(properties.sharedMemPerBlock);
    info.fp8_instruction = device < kMostDevices && instruction_in_force(device) ? 1 : 0;
    snprintf(info.name, sizeof info.name, "%s", properties.name);
    return TE_HAL_OK;
}

// Launch the comparison and fetch its result; waits for the device.
inline int32_t compare_encoders(bool all, int64_t* mismatches, uintptr_t stream) {
    static uint32_t counts[kAgreementBlocks];
    void* on_device = nullptr;
    int32_t status = check_runtime(TE_RUNTIME(Malloc)(&on_device, sizeof counts));
    if (status != TE_HAL_OK) return status;
    status = launch(kAgreementBlocks, stream, &count_fp8_disagreements, static_cast<uint32_t*>(on_device), all);
    if (status == TE_HAL_OK) {
        status = check_runtime(TE_RUNTIME(StreamSynchronize)(reinterpret_cast<TE_RUNTIME(Stream_t)>(stream)));
    }
    if (status == TE_HAL_OK) {
        status = check_runtime(TE_RUNTIME(Memcpy)(counts, on_device, sizeof counts, TE_RUNTIME(MemcpyDeviceToHost)));
    }
    TE_RUNTIME(Free)(on_device);
    for (const uint32_t count : counts) *mismatches += status == TE_HAL_OK ? count : 0;
    return status;
}

// Whether the library was built with an instruction for the device's architecture.
inline bool knows_instruction(int major, int minor) {
    #if defined(TE_NO_FP8_INSTRUCTION)
    return major < 0 && minor < 0;
    #elif TE_TARGET_MUSA
    return major * 10 + minor >= 31;
    #else
    return major * 10 + minor >= 89;
    #endif
}

inline int32_t select_fp8_encoder(int32_t instruction, int64_t* mismatches, uintptr_t stream) {
    Arguments arguments("select_fp8_encoder");
    int32_t status =
        arguments.code("instruction", instruction, 0, 2).require(mismatches != nullptr, "mismatches is null").status();
    if (status != TE_HAL_OK) return status;
    *mismatches = 0;
    const int device = current_device();
    if (instruction == 0) {
        if (device < kMostDevices) __atomic_store_n(&instruction_in_force(device), false, __ATOMIC_RELAXED);
        return TE_HAL_OK;
    }
    TE_RUNTIME(DeviceProp) properties;
    status = properties_of(device, properties);
    if (status != TE_HAL_OK) return status;
    if (device >= kMostDevices || !knows_instruction(properties.major, properties.minor)) {
        return fail(TE_HAL_UNSUPPORTED, "no FP8 instruction for architecture %d.%d in this library", properties.major,
                    properties.minor);
    }
    status = compare_encoders(instruction == 2, mismatches, stream);
    if (status != TE_HAL_OK) return status;
    __atomic_store_n(&instruction_in_force(device), *mismatches == 0, __ATOMIC_RELAXED);
    return TE_HAL_OK;
}

#endif

inline int32_t device_info(int32_t device, te_hal_device_info* info) {
    Arguments arguments("device_info");
    int32_t status =
        arguments.require(info != nullptr, "info is null")
            .require(info == nullptr || info->struct_size >= sizeof info->struct_size, "info->struct_size is not set")
            .status();
    if (status != TE_HAL_OK) return status;
    te_hal_device_info found = {};
    status = describe_device(device, found);
    if (status != TE_HAL_OK) return status;
    const uint32_t size = info->struct_size < sizeof found ? info->struct_size : static_cast<uint32_t>(sizeof found);
    found.struct_size = info->struct_size;
    memcpy(info, &found, size);
    return TE_HAL_OK;
}

}  // namespace te
