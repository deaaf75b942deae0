#pragma once

#include <atomic>
#include <cstdint>

namespace elasticstate {

/// The number of completed ticks and the hold bit in one atomic word.
///
/// The tick's end is a fetch_add, the sentinel's hold a fetch_or, and both act on the value that was there before.
/// So of a tick's end and a hold one comes first, and both sides know which: either the hold's answer counts the tick,
/// or the tick's end sees the hold. Two words (check the hold, then count) have a gap in which both miss each other.
class HoldWord {
public:
    static constexpr std::uint64_t HOLD = std::uint64_t{1} << 63;

    std::uint64_t add_tick() noexcept { return word_.fetch_add(1); }
    std::uint64_t hold() noexcept { return word_.fetch_or(HOLD); }
    void clear() noexcept { word_.fetch_and(~HOLD); }
    void reset() noexcept { word_.store(0); }
    std::uint64_t load() const noexcept { return word_.load(); }

private:
    std::atomic<std::uint64_t> word_{0};
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace elasticstate
