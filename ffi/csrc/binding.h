/*
 * What the Python binding adds to te_hal.h: opening a library and asking it for its table. The trampolines that follow
 * it in the extension are generated from te_hal.h by build_native.py.
 */
#include <dlfcn.h>
#include <stdio.h>

#include "te_hal.h"

/* Status of a trampoline whose entry the table does not have. No library returns it. */
#define TE_HAL_MISSING_ENTRY (-1)

/* Stands for a table that must not be used any more: every trampoline answers TE_HAL_MISSING_ENTRY. */
static const te_hal_api te_hal_closed_table = {8, 0};

static const te_hal_api *te_hal_closed(void) { return &te_hal_closed_table; }

static int32_t te_hal_api_size(void) { return (int32_t)TE_HAL_API_SIZE; }

/* NULL: `text` has what the loader said. Symbols stay local, so that several libraries can be open at once. */
static void *te_hal_open_library(const char *path, char *text, int32_t size) {
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *const error = dlerror();
        snprintf(text, (size_t)size, "%s", error != NULL ? error : "dlopen gave no reason");
    }
    return library;
}

/* Of a library that was refused, so that another file in its place is not taken for it. */
static void te_hal_close_library(void *library) { dlclose(library); }

static uintptr_t te_hal_find_symbol(void *library, const char *name) { return (uintptr_t)dlsym(library, name); }

static const te_hal_api *te_hal_ask_for_table(uintptr_t get_api, uint32_t highest_abi_version) {
    return ((te_hal_get_api_function)get_api)(highest_abi_version);
}
