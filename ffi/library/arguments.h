// Checks of an entry's arguments, all on the host and before any launch. The first one that fails decides.
#pragma once

#include "error.h"

namespace te {

// Sizes multiply to less than this, so that no index, also in bytes and rounded up to tiles, leaves int64_t.
constexpr int64_t kMaxElements = int64_t{1} << 60;

// a * b, or 0 for sizes that Arguments::size and ::product refuse.
inline int64_t elements_of(int64_t a, int64_t b) {
    return a > 0 && b > 0 && a <= (kMaxElements - 1) / b ? a * b : 0;
}

// Addresses of a process lie between: the first page is never mapped, and no supported machine has more than 57 bits.
// A number that was meant to be a value, or has lost its upper half, falls outside more often than not.
constexpr uintptr_t kFirstAddress = 4096;
constexpr uintptr_t kEndOfAddresses = uintptr_t{1} << 57;

// Rounded to fp32, a number of at least the first becomes infinity, and one of at most the second becomes 0.
constexpr double kInfiniteInFloat = 3.4028235677973366e38;  // 2^128 - 2^103
constexpr double kZeroInFloat = 7.006492321624085e-46;      // 2^-150

class Arguments {
  public:
    // `entry` names the entry in this thread's errors from here on.
    explicit Arguments(const char* entry) { last_error_of_thread().op = entry; }

    int32_t status() {
        if (status_ == TE_HAL_OK) find_overlap();
        return status_;
    }

    Arguments& size(const char* name, int64_t value) {
        if (value < 0) refuse(TE_HAL_INVALID_ARGUMENT, "%s is %lld; accepted: 0 or more", name, as_long(value));
        return *this;
    }
    Arguments& at_least(const char* name, int64_t value, int64_t least) {
        if (value < least) {
            refuse(TE_HAL_INVALID_ARGUMENT, "%s is %lld; accepted: %lld or more", name, as_long(value), as_long(least));
        }
        return *this;
    }
    Arguments& product(const char* names, int64_t a, int64_t b) {
        if (a > 0 && b > 0 && a > (kMaxElements - 1) / b) {
            refuse(TE_HAL_SIZE_OVERFLOW, "%s is %lld * %lld; accepted: less than 2^60", names, as_long(a), as_long(b));
        }
        return *this;
    }
    Arguments& code(const char* name, int32_t value, int32_t first, int32_t last) {
        if (value < first || value > last) {
            refuse(TE_HAL_INVALID_ARGUMENT, "%s is %d; accepted: codes %d to %d of te_hal.h", name, value, first, last);
        }
        return *this;
    }
    Arguments& plain_dtype(const char* name, int32_t value) {
        return code(name, value, TE_HAL_FLOAT32, TE_HAL_BFLOAT16);
    }
    Arguments& fp8_dtype(const char* name, int32_t value) {
        return code(name, value, TE_HAL_FLOAT8_E4M3, TE_HAL_FLOAT8_E5M2);
    }
    Arguments& flags(uint32_t value, uint32_t known) {
        if ((value & ~known) != 0) {
            refuse(TE_HAL_INVALID_ARGUMENT, "flags are 0x%x; accepted: those in 0x%x", value, known);
        }
        return *this;
    }
    // Numbers as fp32 has them. Not NaN, not below 0, and finite.
    Arguments& at_least_zero(const char* name, double value) {
        if (!(value >= 0.0 && value < kInfiniteInFloat)) {
            refuse(TE_HAL_INVALID_ARGUMENT, "%s is %g; accepted: 0 or more, finite in fp32", name, value);
        }
        return *this;
    }
    // Not NaN, above 0, and finite.
    Arguments& above_zero(const char* name, double value) {
        if (!(value > kZeroInFloat && value < kInfiniteInFloat)) {
            refuse(TE_HAL_INVALID_ARGUMENT, "%s is %g; accepted: above 0, finite in fp32", name, value);
        }
        return *this;
    }
    Arguments& not_nan(const char* name, double value) {
        if (value != value) refuse(TE_HAL_INVALID_ARGUMENT, "%s is NaN; accepted: any other number", name);
        return *this;
    }
    Arguments& between(const char* name, int64_t value, int64_t least, int64_t most) {
        if (value < least || value > most) {
            refuse(TE_HAL_INVALID_ARGUMENT, "%s is %lld; accepted: %lld to %lld", name, as_long(value), as_long(least),
                   as_long(most));
        }
        return *this;
    }
    Arguments& require(bool holds, const char* sentence) {
        if (!holds) refuse(TE_HAL_INVALID_ARGUMENT, "%s", sentence);
        return *this;
    }
    Arguments& unsupported_if(bool holds, const char* sentence) {
        if (holds) refuse(TE_HAL_UNSUPPORTED, "%s", sentence);
        return *this;
    }

    // Buffers: `count` elements of `bytes` each. Without elements an address is not looked at.
    Arguments& reads(const char* name, uintptr_t address, int64_t count, int64_t bytes) {
        return buffer(name, address, count, bytes, bytes, false);
    }
    Arguments& writes(const char* name, uintptr_t address, int64_t count, int64_t bytes) {
        return buffer(name, address, count, bytes, bytes, true);
    }
    Arguments& reads_optional(const char* name, uintptr_t address, int64_t count, int64_t bytes) {
        return address == 0 ? *this : reads(name, address, count, bytes);
    }
    Arguments& writes_optional(const char* name, uintptr_t address, int64_t count, int64_t bytes) {
        return address == 0 ? *this : writes(name, address, count, bytes);
    }
    Arguments& workspace(uintptr_t address, int64_t size, int64_t needed) {
        if (needed == 0) return *this;
        if (size < needed) {
            refuse(TE_HAL_WORKSPACE_TOO_SMALL, "workspace_size is %lld; accepted: %lld or more (workspace_bytes)",
                   as_long(size), as_long(needed));
        }
        return buffer("workspace", address, needed, 1, 16, true);
    }

  private:
    struct Buffer {
        const char* name;
        uintptr_t first;
        uintptr_t last;
        bool written;
    };
    static constexpr int kMostBuffers = 20;

    static long long as_long(int64_t value) { return static_cast<long long>(value); }

    template <class... Facts>
    void refuse(int32_t status, const char* format, Facts... facts) {
        if (status_ == TE_HAL_OK) status_ = fail(status, format, facts...);
    }

    Arguments& buffer(const char* name, uintptr_t address, int64_t count, int64_t bytes, int64_t alignment,
                      bool written) {
        if (count < 0 || count >= kMaxElements) {
            refuse(TE_HAL_SIZE_OVERFLOW, "%s would have %lld elements; accepted: less than 2^60", name, as_long(count));
        }
        if (status_ != TE_HAL_OK || count == 0) return *this;
        const auto shown = static_cast<unsigned long long>(address);
        if (address == 0) {
            refuse(TE_HAL_INVALID_ARGUMENT, "%s is null; accepted: an address of device memory", name);
        } else if (address % static_cast<uintptr_t>(alignment) != 0) {
            refuse(TE_HAL_MISALIGNED, "%s is 0x%llx; accepted: multiples of %lld", name, shown, as_long(alignment));
        } else if (address < kFirstAddress || address >= kEndOfAddresses ||
                   kEndOfAddresses - address < static_cast<uintptr_t>(count * bytes)) {
            refuse(TE_HAL_INVALID_ARGUMENT, "%s is 0x%llx with %lld bytes, where no process has memory", name, shown,
                   as_long(count * bytes));
        } else if (buffers_ < kMostBuffers) {
            buffer_[buffers_++] = {name, address, address + static_cast<uintptr_t>(count * bytes) - 1, written};
        }
        return *this;
    }

    void find_overlap() {
        for (int i = 0; i < buffers_; ++i) {
            for (int j = 0; j < i; ++j) {
                const Buffer &a = buffer_[i], &b = buffer_[j];
                if ((a.written || b.written) && a.first <= b.last && b.first <= a.last) {
                    refuse(TE_HAL_OVERLAP, "%s and %s share memory; accepted: separate buffers for what is written",
                           b.name, a.name);
                    return;
                }
            }
        }
    }

    int32_t status_ = TE_HAL_OK;
    int buffers_ = 0;
    Buffer buffer_[kMostBuffers];
};

}  // namespace te
