#include "pace.hpp"

#include "wait_clock.hpp"

namespace elasticstate {
namespace {

// Times between two points: the agent reads the page every second, and the page has room for 64 points.
constexpr std::chrono::milliseconds SHORTEST{90};
constexpr std::chrono::milliseconds LONGEST{180};
constexpr std::uint64_t MOST_TICKS = std::uint64_t{1} << 20;

}  // namespace

void Pace::begin(std::uint64_t generation) noexcept {
    measures_ = WaitClock::is_installed();
    WaitClock::watch_this_thread();
    generation_ = generation;
    stride_ = 1;
    own_ns_ = 0;
    resume();
    point_ = last_;
}

void Pace::tick(std::uint64_t tick) noexcept {
    if (!measures_) {
        ticked_ = Clock::now();
        return;
    }
    const Clock::time_point last = last_;
    const std::uint64_t waited = waited_ns_;
    resume();
    ticked_ = last_;
    const auto passed = std::chrono::duration_cast<std::chrono::nanoseconds>(last_ - last).count();
    const std::uint64_t total = static_cast<std::uint64_t>(passed), others = waited_ns_ - waited;
    own_ns_ += total > others ? total - others : 0;
    if (tick < FIRST_TICK || tick % stride_ != 0) {
        return;
    }
    page_.add_point({generation_, tick, own_ns_ / 1000});
    auto since = last_ - point_;
    point_ = last_;
    if (since < SHORTEST && stride_ < MOST_TICKS) {
        stride_ *= 2;
    }
    for (; since > LONGEST && stride_ > 1; since /= 2) {
        stride_ /= 2;
    }
}

void Pace::resume() noexcept {
    last_ = Clock::now();
    waited_ns_ = WaitClock::waited_ns();
}

double Pace::since_tick_s() const noexcept { return std::chrono::duration<double>(Clock::now() - ticked_).count(); }

}  // namespace elasticstate
