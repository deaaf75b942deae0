#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace elasticstate {

constexpr std::size_t MAX_THREADS = 4;
constexpr std::size_t MIN_BYTES_PER_THREAD = std::size_t{8} << 20;  // with fewer, a thread costs more than it saves

inline std::size_t cores() noexcept {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? static_cast<std::size_t>(CPU_COUNT(&set)) : 1;
}

/// Calls work(0) ... work(count - 1), each once, and `end()` at the end of each thread. The number of threads depends on
/// the total of `bytes`.
template <typename Work, typename End>
void in_parallel(std::size_t count, std::size_t bytes, const Work &work, const End &end) {
    std::atomic<std::size_t> next{0};
    const auto take = [&] {
        for (std::size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
            work(i);
        }
        end();
    };
    const std::size_t threads = std::min({MAX_THREADS, cores(), bytes / MIN_BYTES_PER_THREAD, count});
    std::vector<std::jthread> helpers;  // joined by their destructors
    for (std::size_t i = 1; i < threads; ++i) {
        try {
            helpers.emplace_back(take);
        } catch (const std::system_error &) {  // no more threads available: the work takes longer
            break;
        }
    }
    take();
}

template <typename Work>
void in_parallel(std::size_t count, std::size_t bytes, const Work &work) {
    in_parallel(count, bytes, work, [] {});
}

}  // namespace elasticstate
