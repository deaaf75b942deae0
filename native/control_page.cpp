#include "control_page.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <tuple>

#include "crc32c.hpp"

namespace elasticstate {
namespace {

using WordsOfSeal = std::array<std::uint64_t, std::tuple_size_v<SealWords>>;

std::uint32_t checksum_of(const Seal &seal) noexcept { return crc32c(0, &seal, offsetof(Seal, own_checksum)); }

/// A reader that sees this change also sees everything written before it.
void write(SealWords &place, const Seal &seal) noexcept {
    const auto words = std::bit_cast<WordsOfSeal>(seal);
    for (std::size_t i = 0; i < words.size(); ++i) {
        place[i].store(words[i], std::memory_order_release);
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);  // and no later write comes before it
}

Seal read(const SealWords &place) noexcept {
    WordsOfSeal words{};
    for (std::size_t i = 0; i < words.size(); ++i) {
        words[i] = place[i].load(std::memory_order_acquire);
    }
    return std::bit_cast<Seal>(words);
}

/// Returns the index of the valid seal with the higher sequence; -1 if neither is valid.
int current(const SealWords (&places)[2], Seal *found) noexcept {
    int best = -1;
    for (int i = 0; i < 2; ++i) {
        const Seal seal = read(places[i]);
        const bool valid = seal.sequence > 0 && seal.own_checksum == checksum_of(seal);
        if (valid && (best < 0 || seal.sequence > found->sequence)) {
            best = i;
            *found = seal;
        }
    }
    return best;
}

void *map(int fd) {
    const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *const memory = mmap(nullptr, ControlPage::SIZE, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(), "cannot map a control page");
    }
    return memory;
}

void *map_file(int fd) {
    struct stat found {};
    if (fstat(fd, &found) != 0) {
        throw std::system_error(errno, std::generic_category(), "cannot read the size of a control page");
    }
    if (found.st_size < static_cast<off_t>(ControlPage::SIZE)) {
        throw std::invalid_argument("the file is shorter than a control page");
    }
    return map(fd);
}

}  // namespace

ControlPage::ControlPage(std::optional<int> fd)
    : page_(static_cast<ControlLayout *>(fd ? map_file(*fd) : map(-1))) {}

ControlPage::~ControlPage() { munmap(page_, SIZE); }

bool ControlPage::keep_private() noexcept {
    std::array<std::uint8_t, SIZE> copy;
    std::memcpy(copy.data(), page_, SIZE);
    if (mmap(page_, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
        return false;
    }
    std::memcpy(static_cast<void *>(page_), copy.data(), SIZE);
    return true;
}

/// Uses the clock that also counts the time in which the host is suspended.
bool ControlPage::lease_is_over() const noexcept {
    const std::uint64_t until = page_->lease.load(std::memory_order_relaxed);
    if (until == 0) {
        return false;
    }
    struct timespec now {};
    clock_gettime(CLOCK_BOOTTIME, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U + static_cast<std::uint64_t>(now.tv_nsec) > until;
}

void ControlPage::enter(std::uint64_t generation) noexcept {
    page_->version.fetch_add(1);
    page_->generation.store(generation);
    page_->word.reset();
    page_->commit_s.store(0.0);
    page_->trains_since.store(0);
    page_->version.fetch_add(1);
}

void ControlPage::reset() noexcept {
    page_->version.fetch_add(page_->version.load() % 2);  // the last process may have died in the middle of a change
    page_->place.store(0);
    page_->progress.store(0);
    page_->lease.store(0);
    page_->points.store(0);
    page_->pins[0].store(0);
    page_->pins[1].store(0);
    page_->is_alone.store(0);
    enter(0);
}

Stamp ControlPage::stamp() const noexcept {
    Stamp stamp{};
    for (int attempt = 0; attempt < 1000; ++attempt) {
        const std::uint64_t before = page_->version.load();
        stamp = {page_->heartbeat.load(), page_->progress.load(), page_->place.load(), page_->generation.load(),
                 page_->word.load() & ~HoldWord::HOLD};
        if (before % 2 == 0 && page_->version.load() == before) {
            return stamp;
        }
        sched_yield();  // the writer may be waiting for this core
    }
    stamp.ticks = 0;  // they may belong to another generation
    return stamp;
}

void Slate::write(const Words &found) noexcept {
    const std::uint64_t before = number.load() & ~std::uint64_t{1};
    number.store(before + 1);
    for (std::size_t i = 0; i < found.size(); ++i) {
        words[i].store(found[i]);
    }
    number.store(before + 2);
}

std::optional<Words> Slate::read(std::uint64_t &last) const noexcept {
    const std::uint64_t before = number.load();
    if (before == last || before % 2 != 0) {
        return std::nullopt;
    }
    const Words found{words[0].load(), words[1].load(), words[2].load()};
    if (number.load() != before) {
        return std::nullopt;  // others are being written
    }
    last = before;
    return found;
}

void ControlPage::add_point(const Point &point) noexcept {
    const std::uint64_t number = page_->points.load(std::memory_order_relaxed);
    auto &place = page_->ring[number % POINTS];
    place[0].store(point.generation);
    place[1].store(point.tick);
    place[2].store(point.own_us);
    page_->points.store(number + 1);
}

/// The writer may be about to overwrite the oldest place: it is not read.
std::vector<Point> ControlPage::points(std::uint64_t &since) const {
    const auto oldest = [](std::uint64_t end) { return end < POINTS ? 0 : end - POINTS + 1; };
    const std::uint64_t end = page_->points.load();
    std::uint64_t first = std::max(since > end ? 0 : since, oldest(end));  // a new process counts from 0
    std::vector<Point> found;
    for (std::uint64_t number = first; number < end; ++number) {
        const auto &place = page_->ring[number % POINTS];
        found.push_back({place[0].load(), place[1].load(), place[2].load()});
    }
    const std::uint64_t whole = std::min(std::max(first, oldest(page_->points.load())), end);
    found.erase(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(whole - first));
    since = end;
    return found;
}

void ControlPage::seal(std::size_t index, Seal seal) noexcept {
    Seal last{};
    const int at = current(page_->seals[index], &last);
    seal.sequence = last.sequence + 1;
    seal.own_checksum = checksum_of(seal);
    write(page_->seals[index][at == 0 ? 1 : 0], seal);
}

void ControlPage::unseal(std::size_t index) noexcept {
    Seal last{};
    const int at = current(page_->seals[index], &last);
    write(page_->seals[index][at == 0 ? 1 : 0], Seal{});  // the valid one is removed last, so no older id becomes valid
    write(page_->seals[index][at == 0 ? 0 : 1], Seal{});
}

std::optional<Seal> ControlPage::sealed(std::size_t index, const std::array<std::uint8_t, 16> &owner) const noexcept {
    Seal found{};
    const bool mine = current(page_->seals[index], &found) >= 0 && found.owner == owner;
    return mine ? std::optional<Seal>(found) : std::nullopt;
}

}  // namespace elasticstate
