// A stack of its own that runs when it is switched to. Fibres of one family stay on one thread of the host.
//
// Two builds: by default a switch is _setjmp and _longjmp, five times faster than swapcontext, which makes two system
// calls; with TE_FIBER_UCONTEXT it is swapcontext, which sanitizers understand.
#pragma once

#include <ucontext.h>
#if !defined(TE_FIBER_UCONTEXT)
    #include <setjmp.h>
#endif

#include <stddef.h>

namespace te {
namespace emulator {

class Fiber {
  public:
    using Entry = void (*)();

    // The thread's own stack, running now.
    Fiber();

    // A new stack that enters `entry` when it is first switched to; `entry` must not return. Throws std::bad_alloc.
    explicit Fiber(Entry entry);

    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Go on in `next`; returns when somebody switches back to `running`, which is the fibre that calls.
    static void switch_to(Fiber& running, Fiber& next);

    // First thing that an entry calls.
    static void entered();

    int thread = -1;  // the emulated thread that it carries

  private:
    void* memory_ = nullptr;
    bool started_ = false;
    ucontext_t context_;
#if !defined(TE_FIBER_UCONTEXT)
    jmp_buf place_;
#endif
};

}  // namespace emulator
}  // namespace te
