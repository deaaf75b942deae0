#include "wait_clock.hpp"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string_view>

#include "import_table.hpp"

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

bool replace_all(std::string_view name) noexcept {
    const std::optional<ImportTable> table = ImportTable::of(name);
    if (!table) {
        return false;
    }
    // A wait with a time-out is one of the first two, as the library's compiler decided.
    const bool timed = table->replace("pthread_cond_timedwait", timed_wait, &measured_timed_wait);
    const bool clocked = table->replace("pthread_cond_clockwait", clock_wait, &measured_clock_wait);
    return table->replace("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", wait, &measured_wait) &&
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
