#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <vector>

namespace elasticstate {

/// Wakes operations of an ended generation that Gloo itself would leave asleep until the time-out of their group.
///
/// A pair that loses its connection tells all operations that wait for it to begin, but not the one that is half done:
/// a message of which some bytes have been read, or are still to be written, is forgotten (Pair::signalException of
/// gloo/transport/tcp/pair.cc looks at neither rx_ nor tx_ for unbound buffers). So a worker whose peer is killed in the
/// middle of a large tensor sleeps on: half an hour by default, measured with torch 2.13 in both directions.
///
/// What sleeps is a thread of torch's that runs one collective at a time ("pt_gloo_runloop"), in a wait with a time-out
/// on a condition variable; between two collectives it waits without one. Such a thread gets a signal whose handler
/// makes sure that it has interrupted that very wait, and throws: the exception leaves the wait as cancellation would,
/// is caught where torch runs the collective, and becomes the error of whoever waits for it.
///
/// (It may also stand there because it waits for the GIL; then the handler lets it be.)
///
/// Where that does not help (another architecture, the signal is taken) the process kills itself: a worker that is
/// replaced resumes from its commit within seconds.
class GlooWaits {
public:
    /// To be called again and again while a generation has ended, all its sockets are cut, and it is not left.
    void wake();
    /// Whether one of those threads has something to do.
    static bool busy();

private:
    using Clock = std::chrono::steady_clock;

    /// A thread in a wait with a time-out.
    struct Wait {
        pid_t thread;
        std::uint64_t address;  // of the futex
        Clock::time_point since;
        bool interrupted;
    };

    Clock::time_point next_look_{};
    std::vector<Wait> waits_;
};

}  // namespace elasticstate
