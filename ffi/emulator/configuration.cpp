#include "configuration.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "emulator.h"

namespace te {
namespace emulator {
namespace {

constexpr char kVariable[] = "TE_HAL_EMULATOR";
constexpr int32_t kMostThreads = 256;

bool makes_sense(const Configuration& c) {
    return c.threads >= 0 && c.threads <= kMostThreads && (c.wave == 32 || c.wave == 128);
}

bool parse_field(const char* name, size_t length, long long value, Configuration& into) {
    const auto is = [&](const char* known) { return strlen(known) == length && memcmp(known, name, length) == 0; };
    if (is("seed")) {
        into.seed = value;
        return true;
    }
    if (value < 0 || value > kMostThreads) return false;
    if (is("threads")) into.threads = static_cast<int32_t>(value);
    if (is("wave")) into.wave = static_cast<int32_t>(value);
    return is("threads") || is("wave");
}

// "threads=2,wave=128,seed=7", any of them in any order.
bool parse(const char* text, Configuration& into) {
    while (*text != '\0') {
        const char* const equals = strchr(text, '=');
        if (equals == nullptr) return false;
        char* end = nullptr;
        errno = 0;
        const long long value = strtoll(equals + 1, &end, 10);
        if (end == equals + 1 || errno != 0 || (*end != ',' && *end != '\0')) return false;
        if (!parse_field(text, static_cast<size_t>(equals - text), value, into)) return false;
        text = *end == ',' ? end + 1 : end;
    }
    return makes_sense(into);
}

// Atomics rather than a lock, which a forked child could find held for ever.
struct Settings {
    std::atomic<int32_t> threads{0};
    std::atomic<int32_t> wave{32};
    std::atomic<int64_t> seed{-1};
    std::atomic<bool> refused{false};
    char error[256] = "";

    Settings() {
        const char* const text = getenv(kVariable);
        if (text == nullptr) return;
        Configuration asked = {threads, wave, seed};
        if (parse(text, asked)) {
            take(asked);
            return;
        }
        refused = true;
        snprintf(error, sizeof error,
                 "%s is \"%.80s\"; accepted: threads=0 to %d, wave=32 or 128, seed=a number, separated by commas",
                 kVariable, text, kMostThreads);
    }

    void take(const Configuration& asked) {
        threads = asked.threads;
        wave = asked.wave;
        seed = asked.seed;
        refused = false;
    }
};

// The environment counts as it was when the library was loaded.
Settings settings;

}  // namespace

Configuration configuration() {
    return {settings.threads, settings.wave, settings.seed};
}

const char* configuration_error() {
    return settings.refused ? settings.error : nullptr;
}

bool configure(int32_t threads, int32_t wave, int64_t seed) {
    const Configuration asked = {threads, wave, seed};
    if (!makes_sense(asked)) return false;
    settings.take(asked);
    return true;
}

}  // namespace emulator
}  // namespace te
