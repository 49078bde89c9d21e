// The status and the sentence of a failed call.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <memory>

#include "../include/te_hal.h"

namespace te {

struct LastError {
    const char* op = "";  // entry that runs on this thread
    char text[512] = "";
};

// On the heap: what a library keeps in thread-local storage itself must fit what the loader has left of it.
inline LastError& last_error_of_thread() {
    static thread_local std::unique_ptr<LastError> error;
    if (error == nullptr) error = std::make_unique<LastError>();
    return *error;
}

// Keep "entry: sentence" for last_error() and return `status`.
__attribute__((format(printf, 2, 3))) inline int32_t fail(int32_t status, const char* format, ...) {
    LastError& error = last_error_of_thread();
    const int used = snprintf(error.text, sizeof error.text, "%s: ", error.op);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error.text + used, sizeof error.text - static_cast<size_t>(used), format, arguments);
    va_end(arguments);
    return status;
}

inline const char* last_error() {
    try {
        return last_error_of_thread().text;
    } catch (...) {
        return "no memory for the text of the error";
    }
}

// What stands in the table: the entry, and nothing thrown across the C boundary.
template <auto entry>
struct Guard;

template <class Result, class... Parameters, Result (*entry)(Parameters...)>
struct Guard<entry> {
    static Result call(Parameters... arguments) {
        try {
            return entry(arguments...);
        } catch (...) {
            return static_cast<Result>(fail(TE_HAL_INTERNAL_ERROR, "an exception"));
        }
    }
};

}  // namespace te
