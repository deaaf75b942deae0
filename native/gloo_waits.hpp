#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <vector>

namespace elasticstate {

/// Wakes operations of an ended generation that Gloo itself would let sleep until the time-out of their group.
///
/// A pair that loses its connection fails all operations that have not begun, but not the one in progress: a message of
/// which some bytes were read, or are still to be written, gets no error (Pair::signalException of
/// gloo/transport/tcp/pair.cc ignores rx_ and tx_ for unbound buffers). So a worker whose peer is killed in the middle
/// of a large tensor keeps sleeping: half an hour by default, measured with torch 2.13 in both directions.
///
/// The sleeping thread is one of torch's that run one collective at a time ("pt_gloo_runloop"). It waits on a condition
/// variable with a time-out; between two collectives it waits without one. It is sent a signal. The handler verifies
/// that it has interrupted that wait, and throws: the exception leaves the wait as a cancellation would, torch catches
/// it where it runs the collective, and the thread that waits for the collective gets it as an error.
///
/// (The thread may also wait for the GIL there. Then the handler does nothing.)
///
/// Where that is impossible (another architecture, another user of the signal), the process kills itself: the next
/// worker in its slot resumes from the commit within seconds.
class GlooWaits {
public:
    /// Call it repeatedly after a generation has ended and all its sockets are cut, until the generation is left.
    void wake();
    /// True if one of those threads runs an operation.
    static bool busy();

private:
    using Clock = std::chrono::steady_clock;

    /// A thread in a wait with a time-out.
    struct Wait {
        pid_t thread;
        std::uint64_t address;  // address of the futex
        Clock::time_point since;
        bool interrupted;
    };

    Clock::time_point next_look_{};
    std::vector<Wait> waits_;
};

}  // namespace elasticstate
