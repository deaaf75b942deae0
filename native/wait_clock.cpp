#include "wait_clock.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <string_view>

namespace elasticstate {
namespace {

constexpr std::string_view MAIN_LIBRARY = "libtorch_cpu.so";
constexpr std::string_view OTHER_LIBRARY = "libtorch_python.so";  // has some inline functions of the first one again

using Wait = void (*)(void *, void *);  // std::condition_variable::wait
using TimedWait = int (*)(pthread_cond_t *, pthread_mutex_t *, const timespec *);
using ClockWait = int (*)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const timespec *);

// What the entries contained. A constant from before the first call of a replacement.
std::atomic<Wait> wait{nullptr};
std::atomic<TimedWait> timed_wait{nullptr};
std::atomic<ClockWait> clock_wait{nullptr};

std::atomic<bool> installed{false};
std::atomic<pthread_t> watched{};
std::atomic<std::uint64_t> waited{0};

/// Adds the time of its life to the clock, even if the wait ends with an exception (see gloo_waits.hpp).
class Measure {
public:
    ~Measure() {
        const auto passed = std::chrono::steady_clock::now() - begun_;
        const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
        waited.fetch_add(static_cast<std::uint64_t>(ns), std::memory_order_relaxed);
    }

private:
    std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

bool is_watched() noexcept { return watched.load(std::memory_order_relaxed) == pthread_self(); }

void measured_wait(void *condition, void *lock) {
    if (!is_watched()) {
        wait.load()(condition, lock);
        return;
    }
    const Measure measure;
    wait.load()(condition, lock);
}

int measured_timed_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, const timespec *until) {
    if (!is_watched()) {
        return timed_wait.load()(condition, mutex, until);
    }
    const Measure measure;
    return timed_wait.load()(condition, mutex, until);
}

int measured_clock_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock, const timespec *until) {
    if (!is_watched()) {
        return clock_wait.load()(condition, mutex, clock, until);
    }
    const Measure measure;
    return clock_wait.load()(condition, mutex, clock, until);
}

/// One loaded library, with the parts of it that are needed to find an entry.
struct Library {
    std::string_view name;
    ElfW(Addr) base = 0;
    ElfW(Addr) begin = ~ElfW(Addr){0}, end = 0;           // of its memory
    ElfW(Addr) read_only_begin = 0, read_only_end = 0;  // made read-only after relocation
    const ElfW(Sym) *symbols = nullptr;
    const char *names = nullptr;
    const ElfW(Rela) *calls = nullptr;  // the relocations of functions
    std::size_t count = 0;

    bool contains(const void *address) const noexcept {
        const auto at = reinterpret_cast<ElfW(Addr)>(address);
        return begin <= at && at < end;
    }
};

void read_dynamic(Library &library, const ElfW(Dyn) *entry) noexcept {
    for (; entry->d_tag != DT_NULL; ++entry) {
        switch (entry->d_tag) {
            case DT_SYMTAB: library.symbols = reinterpret_cast<const ElfW(Sym) *>(entry->d_un.d_ptr); break;
            case DT_STRTAB: library.names = reinterpret_cast<const char *>(entry->d_un.d_ptr); break;
            case DT_JMPREL: library.calls = reinterpret_cast<const ElfW(Rela) *>(entry->d_un.d_ptr); break;
            case DT_PLTRELSZ: library.count = entry->d_un.d_val / sizeof(ElfW(Rela)); break;
            default: break;
        }
    }
}

int find_library(dl_phdr_info *info, std::size_t, void *result) noexcept {
    auto &library = *static_cast<Library *>(result);
    const std::string_view path = info->dlpi_name;
    if (path.substr(path.rfind('/') + 1) != library.name) {
        return 0;
    }
    library.base = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr) &header = info->dlpi_phdr[i];
        const ElfW(Addr) begin = info->dlpi_addr + header.p_vaddr, end = begin + header.p_memsz;
        if (header.p_type == PT_LOAD) {
            library.begin = std::min(library.begin, begin);
            library.end = std::max(library.end, end);
        } else if (header.p_type == PT_GNU_RELRO) {
            library.read_only_begin = begin;
            library.read_only_end = end;
        } else if (header.p_type == PT_DYNAMIC) {
            read_dynamic(library, reinterpret_cast<const ElfW(Dyn) *>(begin));
        }
    }
    return 1;
}

/// Replaces the content of an entry. Threads may call through it meanwhile.
bool write_entry(const Library &library, void **entry, void *function) noexcept {
    const auto at = reinterpret_cast<ElfW(Addr)>(entry);
    const bool read_only = library.read_only_begin <= at && at < library.read_only_end;
    const auto size = static_cast<ElfW(Addr)>(sysconf(_SC_PAGESIZE));
    void *const page = reinterpret_cast<void *>(at & ~(size - 1));
    if (read_only && mprotect(page, size, PROT_READ | PROT_WRITE) != 0) {
        return false;
    }
    __atomic_store_n(entry, function, __ATOMIC_SEQ_CST);
    if (read_only) {
        mprotect(page, size, PROT_READ);
    }
    return true;
}

/// Replaces the function `name`, if the library calls it. False: it does not, or the entry is not resolved yet: its
/// content is then a stub of the library itself.
template <class Function>
bool replace(const Library &library, std::string_view name, std::atomic<Function> &before, Function after) noexcept {
    for (std::size_t i = 0; i < library.count; ++i) {
        const ElfW(Rela) &call = library.calls[i];
        if (library.names + library.symbols[ELF64_R_SYM(call.r_info)].st_name != name) {
            continue;
        }
        auto *const entry = reinterpret_cast<void **>(library.base + call.r_offset);
        void *const present = __atomic_load_n(entry, __ATOMIC_SEQ_CST);
        if (present == nullptr || library.contains(present)) {
            return false;
        }
        before = reinterpret_cast<Function>(present);
        return write_entry(library, entry, reinterpret_cast<void *>(after));
    }
    return false;
}

bool replace_all(std::string_view name) noexcept {
    Library library;
    library.name = name;
    if (dl_iterate_phdr(find_library, &library) == 0 || library.calls == nullptr || library.symbols == nullptr ||
        library.names == nullptr) {
        return false;
    }
    // A wait with a time-out is one of the first two, as the library's compiler decided.
    const bool timed = replace(library, "pthread_cond_timedwait", timed_wait, &measured_timed_wait);
    const bool clocked = replace(library, "pthread_cond_clockwait", clock_wait, &measured_clock_wait);
    return replace(library, "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", wait, &measured_wait) &&
           (timed || clocked);
}

bool replace_everywhere() noexcept {
    if (!replace_all(MAIN_LIBRARY)) {
        return false;
    }
    replace_all(OTHER_LIBRARY);  // absent where no Python is
    return true;
}

}  // namespace

bool WaitClock::install() noexcept {
    static std::once_flag once;
    std::call_once(once, [] { installed = replace_everywhere(); });
    return installed;
}

bool WaitClock::is_installed() noexcept { return installed; }

void WaitClock::watch_this_thread() noexcept { watched = pthread_self(); }

std::uint64_t WaitClock::waited_ns() noexcept { return waited.load(std::memory_order_relaxed); }

}  // namespace elasticstate
