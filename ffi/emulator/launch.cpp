// Launches: blocks spread over a pool of the host's threads, the calling one among them.
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "block.h"

namespace te {
namespace emulator {
namespace {

struct Fault {
    char text[256] = "";
};

// On the heap: thread-local storage is scarce in a library that has initial-exec variables.
Fault& fault_of_thread() {
    static thread_local std::unique_ptr<Fault> fault;
    if (fault == nullptr) fault = std::make_unique<Fault>();
    return *fault;
}

__attribute__((format(printf, 1, 2))) void set_fault(const char* format, ...) {
    Fault& fault = fault_of_thread();
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault.text, sizeof fault.text, format, arguments);
    va_end(arguments);
}

// Blocks of one launch, handed out one by one.
class Work {
  public:
    explicit Work(const Launch& launch) : launch_(launch) {}

    // Take and run blocks until none is left. Called by every thread that takes part.
    void take_part() {
        try {
            BlockRunner& runner = own_runner();
            runner.begin(launch_);
            for (int64_t next = next_++; next < launch_.blocks && outcome_ == Outcome::kDone; next = next_++) {
                const bool backwards = launch_.configuration.seed >= 0 && launch_.configuration.seed % 2 == 1;
                if (runner.run(backwards ? launch_.blocks - 1 - next : next)) continue;
                note(runner.out_of_memory() ? Outcome::kOutOfMemory : Outcome::kFault, runner.fault());
            }
        } catch (const std::bad_alloc&) {
            note(Outcome::kOutOfMemory, "no memory for another stack");
        }
    }

    Outcome outcome() const { return outcome_; }
    const char* text() const { return text_; }

  private:
    void note(Outcome outcome, const char* text) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (outcome_ != Outcome::kDone) return;
        snprintf(text_, sizeof text_, "%s", text);
        outcome_ = outcome;
    }

    const Launch launch_;
    std::atomic<int64_t> next_{0};
    std::atomic<Outcome> outcome_{Outcome::kDone};
    std::mutex mutex_;
    char text_[256] = "";
};

// Threads that wait for work. One launch at a time has them; one that comes meanwhile runs on its own thread alone.
class Pool {
  public:
    void help(Work& work, int helpers) {
        helpers = start_threads(helpers);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
            wanted_ = helpers;
            busy_ = helpers;
            ++round_;
        }
        arrived_.notify_all();
        work.take_part();
        std::unique_lock<std::mutex> lock(mutex_);
        finished_.wait(lock, [this] { return busy_ == 0; });
    }

  private:
    // As many of `helpers` as the system lets us have. They take no signals: those are for the program's own threads.
    int start_threads(int helpers) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; started_ < helpers; ++started_) std::thread(&Pool::wait_for_work, this, started_).detach();
        } catch (const std::system_error&) {
            helpers = started_;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return helpers;
    }

    void wait_for_work(int number) {
        uint64_t seen = 0;
        for (;;) {
            Work* work = nullptr;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                arrived_.wait(lock, [&] { return round_ != seen && number < wanted_; });
                seen = round_;
                work = work_;
            }
            work->take_part();
            const std::lock_guard<std::mutex> lock(mutex_);
            if (--busy_ == 0) finished_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable arrived_;
    std::condition_variable finished_;
    Work* work_ = nullptr;
    uint64_t round_ = 0;
    int wanted_ = 0;
    int busy_ = 0;
    int started_ = 0;
};

// Never destroyed: its threads wait in it until the process ends.
Pool* pool = nullptr;
std::mutex pool_mutex;

// A forked child has none of the pool's threads. The lock is taken across the fork, so that no launch has them just
// then, and the child starts a pool of its own when it needs one.
void before_fork() {
    pool_mutex.lock();
}
void after_fork_in_parent() {
    pool_mutex.unlock();
}
void after_fork_in_child() {
    pool = nullptr;
    pool_mutex.unlock();
}
const int kForkHandlers = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

void run(Work& work, int64_t blocks) {
    const int helpers = static_cast<int>(blocks < worker_count() ? blocks : worker_count()) - 1;
    const std::unique_lock<std::mutex> lock(pool_mutex, std::try_to_lock);
    if (helpers < 1 || !lock.owns_lock()) {
        work.take_part();
        return;
    }
    try {
        if (pool == nullptr) pool = new Pool;
    } catch (const std::bad_alloc&) {
        work.take_part();
        return;
    }
    pool->help(work, helpers);
}

}  // namespace

int worker_count() {
    const int wanted = configuration().threads;
    if (wanted > 0) return wanted;
    static const int processors = static_cast<int>(std::thread::hardware_concurrency());
    return processors > 0 ? processors : 1;
}

const char* last_fault() {
    return fault_of_thread().text;
}

Outcome launch_blocks(int64_t blocks, int threads_per_block, Body body, const void* argument) {
    (void)kForkHandlers;
    if (const char* const error = configuration_error()) {
        set_fault("%s", error);
        return Outcome::kMisconfigured;
    }
    if (blocks < 1 || blocks > 2147483647 || threads_per_block < 1 || threads_per_block > kMostThreadsPerBlock) {
        set_fault("a grid of %lld blocks of %d threads", static_cast<long long>(blocks), threads_per_block);
        return Outcome::kFault;
    }
    Work work(Launch{blocks, threads_per_block, body, argument, configuration()});
    run(work, blocks);
    if (work.outcome() != Outcome::kDone) set_fault("%s", work.text());
    return work.outcome();
}

}  // namespace emulator
}  // namespace te
