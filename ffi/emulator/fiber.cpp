#include "fiber.h"

#include <sys/mman.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
    #include <pthread.h>
    #include <sanitizer/common_interface_defs.h>
    #if !defined(TE_FIBER_UCONTEXT)
        #error "the address sanitizer follows swapcontext only: build with -DTE_FIBER_UCONTEXT"
    #endif
#endif

namespace te {
namespace emulator {
namespace {

constexpr size_t kGuard = 4096;
constexpr size_t kStack = 64 * 1024;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kUsable = 4 * kStack;  // red zones around every local
#else
constexpr size_t kUsable = kStack;
#endif

}  // namespace

Fiber::Fiber() : started_(true) {
    getcontext(&context_);
#if defined(__SANITIZE_ADDRESS__)
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
        pthread_attr_getstack(&attributes, &context_.uc_stack.ss_sp, &context_.uc_stack.ss_size);
        pthread_attr_destroy(&attributes);
    }
#endif
}

Fiber::Fiber(Entry entry) {
    memory_ =
        mmap(nullptr, kGuard + kUsable, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory_, kGuard, PROT_NONE);
    getcontext(&context_);
    context_.uc_stack.ss_sp = static_cast<char*>(memory_) + kGuard;
    context_.uc_stack.ss_size = kUsable;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
}

Fiber::~Fiber() {
    if (memory_ != nullptr) munmap(memory_, kGuard + kUsable);
}

#if defined(TE_FIBER_UCONTEXT)

void Fiber::switch_to(Fiber& running, Fiber& next) {
    if (&running == &next) return;
    #if defined(__SANITIZE_ADDRESS__)
    void* frames = nullptr;
    __sanitizer_start_switch_fiber(&frames, next.context_.uc_stack.ss_sp, next.context_.uc_stack.ss_size);
    swapcontext(&running.context_, &next.context_);
    __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
    #else
    swapcontext(&running.context_, &next.context_);
    #endif
}

#else

void Fiber::switch_to(Fiber& running, Fiber& next) {
    if (&running == &next) return;
    if (_setjmp(running.place_) != 0) return;
    if (next.started_) _longjmp(next.place_, 1);
    next.started_ = true;
    setcontext(&next.context_);
}

#endif

void Fiber::entered() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

}  // namespace emulator
}  // namespace te
