// Memory that several groups of one call name: what one of them writes is nobody else's.
#pragma once

#include <stdlib.h>

#include <vector>

#include "error.h"

namespace te {

// On the host, in n log n steps, as a call may have thousands of groups, whose own arguments were checked before.
class GroupMemory {
  public:
    explicit GroupMemory(int groups) { spans_.reserve(static_cast<size_t>(groups) * 3); }

    void reads(const char* name, int group, uintptr_t address, int64_t bytes) {
        add(name, group, address, bytes, false);
    }
    void writes(const char* name, int group, uintptr_t address, int64_t bytes) {
        add(name, group, address, bytes, true);
    }

    // In order of address, a span meets an earlier one exactly if it begins before the farthest end so far.
    int32_t status() {
        // std::sort comes with <algorithm>, which clang's own headers for device code replace.
        qsort(spans_.data(), spans_.size(), sizeof(Span), &by_address);
        const Span *read = nullptr, *written = nullptr;
        for (const Span& span : spans_) {
            if (written != nullptr && span.first <= written->last) return overlap(*written, span);
            if (span.is_written && read != nullptr && span.first <= read->last) return overlap(*read, span);
            const Span*& farthest = span.is_written ? written : read;
            if (farthest == nullptr || span.last > farthest->last) farthest = &span;
        }
        return TE_HAL_OK;
    }

  private:
    struct Span {
        const char* name;
        int group;
        uintptr_t first;
        uintptr_t last;
        bool is_written;
    };

    static int by_address(const void* one, const void* other) {
        const auto *const a = static_cast<const Span*>(one), *const b = static_cast<const Span*>(other);
        if (a->first != b->first) return a->first < b->first ? -1 : 1;
        return a->group < b->group ? -1 : a->group > b->group;
    }
    void add(const char* name, int group, uintptr_t address, int64_t bytes, bool is_written) {
        if (bytes == 0) return;
        spans_.push_back({name, group, address, address + static_cast<uintptr_t>(bytes) - 1, is_written});
    }
    static int32_t overlap(const Span& a, const Span& b) {
        return fail(TE_HAL_OVERLAP,
                    "%s of group %d and %s of group %d share memory; accepted: separate buffers for what is written",
                    a.name, a.group, b.name, b.group);
    }

    std::vector<Span> spans_;
};

}  // namespace te
