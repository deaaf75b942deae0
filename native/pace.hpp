#pragma once

#include <chrono>
#include <cstdint>

#include "control_page.hpp"

namespace elasticstate {

/// Measure of a worker's *own time*: the time of its ticks without the waits for other ranks in collectives.
///
/// A world advances at the pace of its slowest rank, so all ranks have equally long ticks. Only the slowest one does
/// not wait. The control page gets (tick, own time since the begin of the generation) at each tick that is a multiple
/// of a stride, a power of two that grows while ticks are short. So ranks have ticks in common even if their strides
/// differ, and a reader that misses points still compares equal ranges of ticks.
class Pace {
public:
    static constexpr std::uint64_t FIRST_TICK = 5;  // before, a world warms up: buckets, buffers, compilation

    explicit Pace(ControlPage &page) noexcept : page_(page) {}

    /// Begins a generation. The calling thread is the one that trains.
    void begin(std::uint64_t generation) noexcept;
    /// Counts a tick, whose number is `tick`, from 1.
    void tick(std::uint64_t tick) noexcept;
    /// Does not count the time since the last tick: the worker was held.
    void resume() noexcept;
    /// The time since the last tick was counted, in seconds: a hold at its end is part of it. Needs a tick.
    double since_tick_s() const noexcept;

private:
    using Clock = std::chrono::steady_clock;

    ControlPage &page_;
    bool measures_ = false;
    std::uint64_t generation_ = 0;
    std::uint64_t stride_ = 1;
    std::uint64_t own_ns_ = 0;
    std::uint64_t waited_ns_ = 0;  // at the last tick
    Clock::time_point last_{};     // the last tick, or the end of the wait after it
    Clock::time_point ticked_{};   // the last tick
    Clock::time_point point_{};    // the last point
};

}  // namespace elasticstate
