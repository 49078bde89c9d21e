#include "block.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <new>
#include <utility>

namespace te {
namespace emulator {

thread_local int current_thread __attribute__((tls_model("initial-exec"))) = 0;
thread_local const BlockPosition* current_block __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

// Set while a block runs. Initial-exec for the same reason as above.
thread_local BlockRunner* active __attribute__((tls_model("initial-exec"))) = nullptr;

const char* file_of(const Site& site) {
    const char* const slash = strrchr(site.file, '/');
    return slash == nullptr ? site.file : slash + 1;
}

}  // namespace

BlockRunner& own_runner() {
    static thread_local std::unique_ptr<BlockRunner> runner;  // large: see initial-exec above
    if (runner == nullptr) runner = std::make_unique<BlockRunner>();
    return *runner;
}

void barrier(const Site& site) {
    active->barrier(site);
}
const uint32_t* exchange(const Site& site, uint32_t value) {
    return active->exchange(site, value);
}
void* shared_memory(const Site& site, size_t bytes, size_t alignment) {
    return active->shared_memory(site, bytes, alignment);
}

BlockRunner::BlockRunner() {
    // Fibres push to these; what they throw nobody would catch.
    fibers_.reserve(kMostThreadsPerBlock);
    idle_.reserve(kMostThreadsPerBlock);
    ready_.reserve(kMostThreadsPerBlock);
    at_barrier_.reserve(kMostThreadsPerBlock);
    shared_.reserve(kMostDeclarations);
}

void BlockRunner::begin(const Launch& launch) {
    launch_ = launch;
    position_.count = launch.blocks;
    shared_.clear();
    shared_used_ = 0;
    failed_ = out_of_memory_ = false;
    // In sequence, every block has the same order.
    for (int thread = 0; thread < launch.threads; ++thread) order_[thread] = thread;
}

bool BlockRunner::run(int64_t index) {
    position_.index = index;
    current_block = &position_;
    active = this;
    if (launch_.configuration.seed >= 0) {
        order_threads(static_cast<uint64_t>(launch_.configuration.seed) +
                      static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15u);
    }
    memset(shared_bytes_, 0xff, shared_used_);
    for (int group = 0; group * kLanes < launch_.threads; ++group) {
        groups_[group].arrived = 0;
        groups_[group].current = 0;
    }
    started_ = ended_ = 0;
    ready_.clear();
    at_barrier_.clear();
    running_ = &own_;
    Fiber& first = idle_fiber();
    running_ = &first;
    Fiber::switch_to(own_, first);
    running_ = &own_;
    active = nullptr;
    current_block = nullptr;
    if (failed_) {
        // Threads of the block are parked in the middle of the kernel. What they have on their stacks is plain data.
        idle_.clear();
        fibers_.clear();
    }
    return !failed_;
}

// Waves in a random order, and the threads within each.
void BlockRunner::order_threads(uint64_t seed) {
    random_state_ = seed | 1;
    const int wave = launch_.configuration.wave;
    const int waves = (launch_.threads + wave - 1) / wave;
    int shuffled[kMostThreadsPerBlock / kLanes];
    for (int i = 0; i < waves; ++i) shuffled[i] = i;
    for (int i = waves; i > 1; --i) std::swap(shuffled[i - 1], shuffled[random() % static_cast<uint32_t>(i)]);
    int next = 0;
    for (int i = 0; i < waves; ++i) {
        int* const threads = order_ + next;
        int count = 0;
        for (int t = shuffled[i] * wave; t < launch_.threads && t < (shuffled[i] + 1) * wave; ++t) threads[count++] = t;
        for (int k = count; k > 1; --k) std::swap(threads[k - 1], threads[random() % static_cast<uint32_t>(k)]);
        next += count;
    }
}

uint32_t BlockRunner::random() {
    random_state_ ^= random_state_ << 13;
    random_state_ ^= random_state_ >> 7;
    random_state_ ^= random_state_ << 17;
    return static_cast<uint32_t>(random_state_ >> 16);
}

void BlockRunner::fiber_entry() {
    Fiber::entered();
    active->carry_threads();
}

// A fibre starts the next thread itself when one ends: a kernel without barriers is a plain loop on one fibre.
void BlockRunner::carry_threads() {
    for (;;) {
        Fiber& self = *running_;
        while (started_ < launch_.threads && !failed_) {
            self.thread = order_[started_++];
            current_thread = self.thread;
            launch_.body(launch_.argument);
            ++ended_;
        }
        idle_.push_back(&self);
        Fiber& next = next_fiber();
        running_ = &next;
        Fiber::switch_to(self, next);
    }
}

// Hand over; returns when the calling thread may go on.
void BlockRunner::park() {
    Fiber& self = *running_;
    Fiber& next = next_fiber();
    running_ = &next;
    Fiber::switch_to(self, next);
    current_thread = self.thread;
}

Fiber& BlockRunner::next_fiber() {
    if (failed_) return own_;
    if (ready_.empty() && started_ < launch_.threads) return idle_fiber();
    if (ready_.empty() && ended_ < launch_.threads && !release_barrier()) return own_;
    if (ready_.empty()) return own_;
    const size_t last = ready_.size() - 1;
    if (launch_.configuration.seed >= 0) std::swap(ready_[random() % ready_.size()], ready_[last]);
    Fiber& next = *ready_[last];
    ready_.pop_back();
    return next;
}

Fiber& BlockRunner::idle_fiber() {
    if (!idle_.empty()) {
        Fiber& fiber = *idle_.back();
        idle_.pop_back();
        return fiber;
    }
    try {  // on a fibre's stack nobody would catch it
        fibers_.push_back(std::make_unique<Fiber>(&BlockRunner::fiber_entry));
        return *fibers_.back();
    } catch (const std::bad_alloc&) {
        out_of_memory_ = true;
        fail("no memory for the stack of another thread");
        return own_;
    }
}

// No thread can go on. If all of them wait at the barrier, they now may.
bool BlockRunner::release_barrier() {
    if (at_barrier_.size() != static_cast<size_t>(launch_.threads)) {
        explain_deadlock();
        return false;
    }
    ready_.assign(at_barrier_.rbegin(), at_barrier_.rend());  // taken from the end: first come, first served
    at_barrier_.clear();
    return true;
}

void BlockRunner::explain_deadlock() {
    for (int group = 0; group * kLanes < launch_.threads; ++group) {
        const Group& waiting = groups_[group];
        if (waiting.arrived == 0) continue;
        fail(
            "%d of the 32 threads from %d on wait in the exchange at %s:%d, which the others never reach: an exchange "
            "in divergent code",
            waiting.arrived, group * kLanes, file_of(*waiting.site), waiting.site->line);
        return;
    }
    fail("%d threads wait at the barrier at %s:%d after %d others have returned", static_cast<int>(at_barrier_.size()),
         file_of(*barrier_site_), barrier_site_->line, ended_);
}

void BlockRunner::fail(const char* format, ...) {
    if (failed_) return;
    failed_ = true;
    char text[200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(fault_, sizeof fault_, "block %lld: %s", static_cast<long long>(position_.index), text);
}

void BlockRunner::barrier(const Site& site) {
    if (!at_barrier_.empty() && barrier_site_ != &site) {
        fail("thread %d waits at the barrier at %s:%d while others wait at %s:%d: a barrier in divergent code",
             current_thread, file_of(site), site.line, file_of(*barrier_site_), barrier_site_->line);
    }
    barrier_site_ = &site;
    at_barrier_.push_back(running_);
    park();
}

const uint32_t* BlockRunner::exchange(const Site& site, uint32_t value) {
    const int thread = current_thread;
    Group& group = groups_[thread / kLanes];
    if (launch_.threads % kLanes != 0) fail("exchanges in a block of %d threads, no multiple of 32", launch_.threads);
    if (group.arrived > 0 && group.site != &site) {
        fail("thread %d joins the exchange at %s:%d while others of its 32 wait at %s:%d", thread, file_of(site),
             site.line, file_of(*group.site), group.site->line);
    }
    group.site = &site;
    const int lane = thread % kLanes;
    uint32_t* const values = group.values[group.current];
    values[lane] = value;
    group.waiting[lane] = running_;
    if (++group.arrived < kLanes) {
        park();
    } else {
        group.arrived = 0;
        group.current ^= 1;
        for (int other = kLanes - 1; other >= 0; --other) {
            if (other != lane) ready_.push_back(group.waiting[other]);
        }
    }
    return values;
}

void* BlockRunner::shared_memory(const Site& site, size_t bytes, size_t alignment) {
    for (const SharedDeclaration& known : shared_) {
        if (known.site == &site) return shared_bytes_ + known.offset;
    }
    const size_t offset = (shared_used_ + alignment - 1) / alignment * alignment;
    if (offset + bytes > kSharedMemory || shared_.size() == kMostDeclarations) {
        fail("%zu bytes of shared memory at %s:%d; the smallest device has %zu", offset + bytes, file_of(site),
             site.line, kSharedMemory);
        // The thread ends here, or it would write past the block's memory.
        Fiber& self = *running_;
        running_ = &own_;
        Fiber::switch_to(self, own_);
    }
    shared_.push_back({&site, offset});
    shared_used_ = offset + bytes;
    memset(shared_bytes_ + offset, 0xff, bytes);
    return shared_bytes_ + offset;
}

}  // namespace emulator
}  // namespace te
