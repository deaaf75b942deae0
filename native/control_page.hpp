#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

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

/// A seal names one sealed commit. It is valid if `own_checksum` is right: it is the CRC-32C of all bytes before it.
struct Seal {
    std::array<std::uint8_t, 16> owner;  // a digest of job, host and slot
    std::uint64_t sequence;              // number of this seal among those of the buffer: the highest is valid
    std::uint64_t generation;
    std::uint64_t tick;
    std::uint64_t layout;    // digest of the buffer's header
    std::uint64_t length;    // bytes that the checksum covers, from the start of the buffer
    std::array<std::uint8_t, 16> tag;  // keyed checksum: only a process with the job's key can compute it
    std::uint32_t checksum;            // CRC-32C of these bytes
    std::uint32_t own_checksum;
};
static_assert(sizeof(Seal) == 80);

/// Place of a seal: words that one process writes while another one may read them.
using SealWords = std::array<std::atomic<std::uint64_t>, sizeof(Seal) / sizeof(std::uint64_t)>;

/// A worker's own time, in microseconds, from the begin of the generation to the end of a tick; see pace.hpp.
struct Point {
    std::uint64_t generation;
    std::uint64_t tick;
    std::uint64_t own_us;
};

constexpr std::size_t POINTS = 64;

using Words = std::array<std::uint64_t, 3>;

/// Three words that one thread of the agent writes and the worker reads, all of one moment.
struct Slate {
    std::atomic<std::uint64_t> number;  // odd while the words change
    std::atomic<std::uint64_t> words[3];

    void write(const Words &found) noexcept;
    /// Returns the newest words if their number is not `last`, and sets `last` to it.
    std::optional<Words> read(std::uint64_t &last) const noexcept;
};

/// One page of shared memory for each slot. The worker writes it, its agent reads it, and it outlives the worker.
///
///     heartbeat       the sentinel adds 1 at each interval
///     progress    state.progress() adds 1
///     version     odd while place, generation and the hold word change together
///     word        ticks and hold bit
///     lease       end of the time for ticks, on CLOCK_BOOTTIME in nanoseconds; 0: no limit. The agent writes it
///     is_stale    the slot's files have lost their names: the worker requests new ones. The agent writes it
///     seals       of both buffers, two places each: a new seal never overwrites the valid one
///     commit_s    seconds that the ticks of this generation spent in commits
///     trains_since  when training in this generation began, on CLOCK_MONOTONIC in nanoseconds; 0: it has not
///     pins        of both buffers: until when the agent copies it, on CLOCK_MONOTONIC in nanoseconds; 0: it does not
///     question    of the driver, for the worker (state/divergence.py)
///     verdict     of the driver on commits: generation, newest tick that is equal on all ranks, newest compared one
///     is_alone    the agent has no driver, so no verdict comes
///     points      number of points that were ever written; the newest are in `ring`
struct ControlLayout {
    std::atomic<std::uint64_t> heartbeat;
    std::atomic<std::uint64_t> progress;
    std::atomic<std::uint64_t> version;
    std::atomic<std::uint64_t> place;
    std::atomic<std::uint64_t> generation;
    HoldWord word;
    std::atomic<std::uint64_t> lease;
    std::atomic<std::uint64_t> is_stale;
    alignas(64) SealWords seals[2][2];
    std::atomic<double> commit_s;
    std::atomic<std::uint64_t> trains_since;
    std::atomic<std::uint64_t> points;
    std::atomic<std::uint64_t> ring[POINTS][3];
    std::atomic<std::uint64_t> pins[2];
    Slate question;
    Slate verdict;
    std::atomic<std::uint64_t> is_alone;
};
static_assert(sizeof(ControlLayout) <= 4096);

/// Stamps, place and ticks, all read at one moment.
struct Stamp {
    std::uint64_t heartbeat;
    std::uint64_t progress;
    std::uint64_t place;
    std::uint64_t generation;
    std::uint64_t ticks;
};

/// A mapping of a control page; private memory if there is no file.
class ControlPage {
public:
    static constexpr std::size_t SIZE = 4096;

    /// The caller keeps `fd`. Throws std::system_error if it cannot be mapped, std::invalid_argument if the file is
    /// shorter than a page.
    explicit ControlPage(std::optional<int> fd);
    ~ControlPage();
    ControlPage(const ControlPage &) = delete;
    ControlPage &operator=(const ControlPage &) = delete;

    HoldWord &word() noexcept { return page_->word; }
    std::uint64_t generation() const noexcept { return page_->generation.load(); }
    std::uint64_t place() const noexcept { return page_->place.load(); }

    void set_lease(std::uint64_t until_ns) noexcept { page_->lease.store(until_ns); }
    bool lease_is_over() const noexcept;
    /// Asks the worker not to overwrite buffer `index` before this time; 0: it may.
    void pin(std::size_t index, std::uint64_t until_ns) noexcept { page_->pins[index].store(until_ns); }
    std::uint64_t pinned_until(std::size_t index) const noexcept { return page_->pins[index].load(); }
    void set_stale(bool stale) noexcept { page_->is_stale.store(stale ? 1 : 0); }
    bool is_stale() const noexcept { return page_->is_stale.load() != 0; }
    void beat() noexcept { page_->heartbeat.fetch_add(1); }
    void progress() noexcept { page_->progress.fetch_add(1); }
    void set_place(std::uint64_t place) noexcept { page_->place.store(place); }
    void begin_training(std::uint64_t now_ns) noexcept { page_->trains_since.store(now_ns); }
    std::uint64_t trains_since() const noexcept { return page_->trains_since.load(); }
    double commit_s() const noexcept { return page_->commit_s.load(); }
    void add_commit_s(double seconds) noexcept { page_->commit_s.store(page_->commit_s.load() + seconds); }
    /// Begins a generation: no ticks, no hold.
    void enter(std::uint64_t generation) noexcept;
    /// Clears everything except the seals, for a new process.
    void reset() noexcept;
    /// Returns values of one moment; without ticks while the writer is stopped in the middle of a change.
    Stamp stamp() const noexcept;
    Slate &question() noexcept { return page_->question; }
    Slate &verdict() noexcept { return page_->verdict; }
    void set_alone(bool alone) noexcept { page_->is_alone.store(alone ? 1 : 0); }
    bool is_alone() const noexcept { return page_->is_alone.load() != 0; }
    /// Adds a point. One thread of the worker calls it.
    void add_point(const Point &point) noexcept;
    /// Returns the points from number `since` on that still are on the page, and sets `since` to the number of the next.
    std::vector<Point> points(std::uint64_t &since) const;
    /// Replaces the page by a private copy. Call it in a forked process, which must not write the worker's page.
    /// False: no memory for the copy.
    bool keep_private() noexcept;

    /// Seals buffer `index` (0 or 1), and sets sequence and own_checksum. Write the commit before.
    void seal(std::size_t index, Seal seal) noexcept;
    /// Removes the seal of buffer `index`. Call it before the bytes of the buffer change.
    void unseal(std::size_t index) noexcept;
    /// Returns the valid seal of buffer `index`, if there is one and its owner is `owner`.
    std::optional<Seal> sealed(std::size_t index, const std::array<std::uint8_t, 16> &owner) const noexcept;

private:
    ControlLayout *page_;
};

}  // namespace elasticstate
