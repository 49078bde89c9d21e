// How the emulated device behaves, for the whole process.
#pragma once

#include <stdint.h>

namespace te {
namespace emulator {

struct Configuration {
    int32_t threads;  // of the host that share the blocks; 0: one per CPU
    int32_t wave;     // 32 or 128: threads that start next to each other in a random order
    int64_t seed;     // of the random order of waves, threads and blocks; negative: in sequence
};

// What is in force. Starts as the environment variable TE_HAL_EMULATOR says when the library is loaded.
Configuration configuration();

// Why that variable cannot be used, or NULL. No launch runs until configure() settles it.
const char* configuration_error();

// False, and nothing changed, if the values make no sense.
bool configure(int32_t threads, int32_t wave, int64_t seed);

}  // namespace emulator
}  // namespace te
