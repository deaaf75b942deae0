#pragma once

#include <atomic>
#include <cstdint>

namespace elasticstate {

/// The number of completed ticks and the hold bit in one atomic word.
///
/// The end of a tick is a fetch_add, the sentinel's hold a fetch_or, and both act on the value before the change. So
/// one of them comes first, and both sides see which: either the answer to the hold counts the tick, or the end of the
/// tick sees the hold. With two words (check the hold, then count), each could miss the other.
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
