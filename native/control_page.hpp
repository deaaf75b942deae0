#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "hold_word.hpp"

namespace elasticstate {

/// Names one sealed commit. Valid if `own_checksum` is right: it is the CRC-32C of all bytes before it.
struct Seal {
    std::array<std::uint8_t, 16> owner;  // whose commits these are: a digest of job, host and slot
    std::uint64_t sequence;              // of the seals that were written for this buffer: the highest counts
    std::uint64_t generation;
    std::uint64_t tick;
    std::uint64_t layout;    // a digest of the buffer's header
    std::uint64_t length;    // bytes that the checksum is over, from the start of the buffer
    std::array<std::uint8_t, 16> tag;  // by which its job knows it again: only who has the job's key can make one
    std::uint32_t checksum;            // CRC-32C of these bytes
    std::uint32_t own_checksum;
};
static_assert(sizeof(Seal) == 80);

/// Where a seal lies: words that one process writes while another may read them.
using SealWords = std::array<std::atomic<std::uint64_t>, sizeof(Seal) / sizeof(std::uint64_t)>;

/// One page of shared memory for each slot. The worker writes it, its agent reads it, and it outlives the worker.
///
///     heartbeat       +1 by the sentinel at each interval
///     progress    +1 by state.progress()
///     version     odd while place, generation and the hold word are being changed together
///     word        ticks and hold bit
///     lease       until when ticks may be made, on CLOCK_BOOTTIME in nanoseconds; 0: no limit. The agent writes it
///     is_stale    the files of the slot have lost their names: the worker asks its agent for others. The agent writes it
///     seals       of both buffers, two places each: a new seal never overwrites the one that counts
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
};
static_assert(sizeof(ControlLayout) <= 4096);

/// Liveness and whereabouts, all of one moment.
struct Stamp {
    std::uint64_t heartbeat;
    std::uint64_t progress;
    std::uint64_t place;
    std::uint64_t generation;
    std::uint64_t ticks;
};

/// A mapping of a control page. Memory of its own if there is no file.
class ControlPage {
public:
    static constexpr std::size_t SIZE = 4096;

    /// `fd` stays the caller's. Throws std::system_error if it cannot be mapped, std::invalid_argument if the file is
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
    void set_stale(bool stale) noexcept { page_->is_stale.store(stale ? 1 : 0); }
    bool is_stale() const noexcept { return page_->is_stale.load() != 0; }
    void beat() noexcept { page_->heartbeat.fetch_add(1); }
    void progress() noexcept { page_->progress.fetch_add(1); }
    void set_place(std::uint64_t place) noexcept { page_->place.store(place); }
    /// A generation begins: no ticks, no hold.
    void enter(std::uint64_t generation) noexcept;
    /// A new process: it has no past but the seals.
    void reset() noexcept;
    /// All of one moment; without ticks while the writer is stopped in the middle of a change.
    Stamp stamp() const noexcept;
    /// In a process that was forked: go on with a copy of one's own, so that the worker's page is not written.
    /// False: there was no memory for it.
    bool keep_private() noexcept;

    /// Seals buffer `index` (0 or 1); fills in sequence and own_checksum. What the seal speaks of was written before.
    void seal(std::size_t index, Seal seal) noexcept;
    /// From now on buffer `index` holds no commit. To be called before its bytes are changed.
    void unseal(std::size_t index) noexcept;
    /// The seal of buffer `index` that counts, if there is one and it is `owner`'s.
    std::optional<Seal> sealed(std::size_t index, const std::array<std::uint8_t, 16> &owner) const noexcept;

private:
    ControlLayout *page_;
};

}  // namespace elasticstate
