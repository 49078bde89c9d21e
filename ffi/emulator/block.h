// Runs the threads of one block at a time, each on a fibre, on the thread of the host that owns the runner.
#pragma once

#include <memory>
#include <vector>

#include "configuration.h"
#include "emulator.h"
#include "fiber.h"

namespace te {
namespace emulator {

constexpr int kMostThreadsPerBlock = 1024;
constexpr int kLanes = 32;
constexpr size_t kMostDeclarations = 16;  // of shared memory in one kernel

// One launch, as all runners see it.
struct Launch {
    int64_t blocks;
    int threads;
    Body body;
    const void* argument;
    Configuration configuration;
};

class BlockRunner {
  public:
    BlockRunner();

    // Forget the launch before; declarations of shared memory belong to a kernel.
    void begin(const Launch& launch);

    // Run block `index` to its end. False if a thread broke a rule; fault() says which.
    bool run(int64_t index);

    const char* fault() const { return fault_; }
    bool out_of_memory() const { return out_of_memory_; }

    // For the threads of the running block (emulator.h).
    void barrier(const Site& site);
    const uint32_t* exchange(const Site& site, uint32_t value);
    void* shared_memory(const Site& site, size_t bytes, size_t alignment);

  private:
    struct SharedDeclaration {
        const Site* site;
        size_t offset;
    };
    // The exchanges of 32 neighbouring threads. Two sets of values, because a lane may reach the next exchange while
    // another still reads this one's.
    struct Group {
        uint32_t values[2][kLanes];
        Fiber* waiting[kLanes];
        const Site* site;
        int arrived;
        int current;
    };

    static void fiber_entry();
    void carry_threads();
    void order_threads(uint64_t seed);
    void park();
    Fiber& next_fiber();
    Fiber& idle_fiber();
    bool release_barrier();
    void explain_deadlock();
    void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
    uint32_t random();

    Launch launch_ = {};
    BlockPosition position_ = {0, 0};
    Fiber own_;
    Fiber* running_ = &own_;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<Fiber*> idle_;
    std::vector<Fiber*> ready_;
    std::vector<Fiber*> at_barrier_;
    const Site* barrier_site_ = nullptr;
    std::vector<SharedDeclaration> shared_;
    size_t shared_used_ = 0;
    int order_[kMostThreadsPerBlock];
    int started_ = 0;
    int ended_ = 0;
    Group groups_[kMostThreadsPerBlock / kLanes];
    uint64_t random_state_ = 1;
    bool failed_ = false;
    bool out_of_memory_ = false;
    char fault_[256] = "";
    alignas(64) unsigned char shared_bytes_[kSharedMemory];
};

// The calling thread's runner.
BlockRunner& own_runner();

}  // namespace emulator
}  // namespace te
