#pragma once

#include <elf.h>
#include <link.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <string_view>

namespace elasticstate {

/// Table of the functions that one loaded library imports. Its entries can be replaced while threads call through them.
class ImportTable {
public:
    /// Returns the table of the library with this file name; none if it is not loaded, or has no such table.
    static std::optional<ImportTable> of(std::string_view library) noexcept;

    /// Replaces the function `name`, if the library calls it. False: it does not, or the entry is not resolved yet: its
    /// content is then a stub of the library itself. `before` has the replaced function before the first call of `after`.
    template <class Function>
    bool replace(std::string_view name, std::atomic<Function> &before, Function after) const noexcept {
        void **const entry = find(name);
        if (entry == nullptr) {
            return false;
        }
        before = reinterpret_cast<Function>(__atomic_load_n(entry, __ATOMIC_SEQ_CST));
        return write(entry, reinterpret_cast<void *>(after));
    }

private:
    static int read_library(dl_phdr_info *info, std::size_t size, void *result) noexcept;
    void read_dynamic(const ElfW(Dyn) *entry) noexcept;
    /// Returns the entry of a function; nullptr if there is none that is resolved.
    void **find(std::string_view name) const noexcept;
    bool write(void **entry, void *function) const noexcept;

    std::string_view library_;
    ElfW(Addr) base_ = 0;
    ElfW(Addr) begin_ = ~ElfW(Addr){0}, end_ = 0;         // of its memory
    ElfW(Addr) read_only_begin_ = 0, read_only_end_ = 0;  // made read-only after relocation
    const ElfW(Sym) *symbols_ = nullptr;
    const char *names_ = nullptr;
    const ElfW(Rela) *calls_ = nullptr;  // the relocations of functions
    std::size_t count_ = 0;
};

}  // namespace elasticstate
