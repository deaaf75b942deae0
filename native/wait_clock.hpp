#pragma once

#include <cstdint>

namespace elasticstate {

/// Time for which one thread, the one that trains, has waited for collectives of Gloo.
///
/// That thread waits on condition variables inside libtorch_cpu.so and libtorch_python.so: `Work.wait()`, the end of a
/// backward pass of DDP, and `wait_tensor` of functional collectives all end there, and most of them never return to
/// Python in between. So the entries of these libraries' tables of imported functions are replaced: the replacement
/// calls the function, and adds the time if the thread is the watched one. Other libraries, and all other threads, are
/// not affected.
///
/// With a GPU, such a wait may also be for the thread of the device, so this measure is for the CPU only.
class WaitClock {
public:
    /// Replaces the entries, once per process. False: this build of torch has none, or they cannot be replaced.
    static bool install() noexcept;
    static bool is_installed() noexcept;
    /// Watches the calling thread from now on, instead of the one before.
    static void watch_this_thread() noexcept;
    /// Nanoseconds for which watched threads have waited so far.
    static std::uint64_t waited_ns() noexcept;
};

}  // namespace elasticstate
