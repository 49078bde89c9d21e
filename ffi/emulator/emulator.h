// What a kernel sees of the host emulation of a device; a launch comes in through launch_blocks.
//
// The threads of a block are fibres that run one at a time, each until it reaches a barrier, an exchange or its end. So
// a missing barrier shows as a wrong result in some order of the threads, and the order is a setting (configuration.h).
// Rules that devices have and a CPU does not are enforced: the size of a grid and of shared memory, shared memory that
// holds nothing in particular at the start, barriers that every thread must reach, exchanges that all 32 lanes join.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace te {
namespace emulator {

constexpr size_t kSharedMemory = 28 * 1024;  // of a block: that of MTT S80, the smallest of the supported boards

// A place in the source, told apart by address: two barriers on one line are two places.
struct Site {
    const char* file;
    int line;
};

struct BlockPosition {
    int64_t index;
    int64_t count;
};

// Which thread and block is running. Initial-exec: one load each, without a call per access in a library that was
// opened at run time.
extern thread_local int current_thread __attribute__((tls_model("initial-exec")));
extern thread_local const BlockPosition* current_block __attribute__((tls_model("initial-exec")));

inline int thread_index() {
    return current_thread;
}
inline int64_t block_index() {
    return current_block->index;
}
inline int64_t block_count() {
    return current_block->count;
}

// Wait until every thread of the block is here.
void barrier(const Site& site);

// Wait until all lanes of the thread's group of 32 are here; then their 32 values, valid until the group's next
// exchange but one.
const uint32_t* exchange(const Site& site, uint32_t value);

// The block's shared memory of one declaration: the same address for every thread, filled with 0xFF at first.
void* shared_memory(const Site& site, size_t bytes, size_t alignment);

enum class Outcome { kDone, kFault, kOutOfMemory, kMisconfigured };

using Body = void (*)(const void* argument);

// Run `body` once per thread of every block and wait for it. Unless all went well, last_fault() of the calling thread
// says what happened.
Outcome launch_blocks(int64_t blocks, int threads_per_block, Body body, const void* argument);
const char* last_fault();

template <class Function>
Outcome launch(int64_t blocks, int threads_per_block, const Function& function) {
    return launch_blocks(
        blocks, threads_per_block, [](const void* argument) { (*static_cast<const Function*>(argument))(); },
        &function);
}

// Threads of the host that share the blocks of a launch.
int worker_count();

}  // namespace emulator
}  // namespace te
