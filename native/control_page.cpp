#include "control_page.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "crc32c.hpp"

namespace elasticstate {
namespace {

std::uint32_t checksum_of(const Seal &seal) noexcept { return crc32c(0, &seal, offsetof(Seal, own_checksum)); }

/// The valid one of two seals with the higher sequence, as an index; none: -1.
int current(const Seal (&places)[2], const std::array<std::uint8_t, 16> *owner, Seal *found) noexcept {
    int best = -1;
    for (int i = 0; i < 2; ++i) {
        Seal copy;
        std::memcpy(&copy, &places[i], sizeof copy);
        std::atomic_thread_fence(std::memory_order_acquire);
        const bool valid = copy.sequence > 0 && copy.own_checksum == checksum_of(copy);
        if (valid && (owner == nullptr || copy.owner == *owner) && (best < 0 || copy.sequence > found->sequence)) {
            best = i;
            *found = copy;
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

void *map_file(const std::string &path) {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        throw std::system_error(errno, std::generic_category(), path);
    }
    struct stat found {};
    void *memory = nullptr;
    try {
        if (fstat(fd, &found) != 0 || found.st_size < static_cast<off_t>(ControlPage::SIZE)) {
            throw std::invalid_argument(path + ": is no control page: it is shorter than one");
        }
        memory = map(fd);
    } catch (...) {
        close(fd);
        throw;
    }
    close(fd);
    return memory;
}

}  // namespace

ControlPage::ControlPage(const std::optional<std::string> &path)
    : page_(static_cast<ControlLayout *>(path ? map_file(*path) : map(-1))) {}

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

void ControlPage::enter(std::uint64_t generation) noexcept {
    page_->version.fetch_add(1);
    page_->generation.store(generation);
    page_->word.reset();
    page_->version.fetch_add(1);
}

void ControlPage::reset() noexcept {
    page_->version.store(0);  // the last process may have died in mid-change
    page_->place.store(0);
    page_->progress.store(0);
    enter(0);
}

Stamp ControlPage::stamp() const noexcept {
    Stamp stamp{};
    for (int attempt = 0; attempt < 1000; ++attempt) {  // a writer that was stopped in between is met half-way
        const std::uint64_t before = page_->version.load();
        stamp = {page_->alive.load(), page_->progress.load(), page_->place.load(), page_->generation.load(),
                 page_->word.load() & ~HoldWord::HOLD};
        if (before % 2 == 0 && page_->version.load() == before) {
            break;
        }
    }
    return stamp;
}

void ControlPage::seal(std::size_t index, Seal seal) noexcept {
    Seal last{};
    const int at = current(page_->seals[index], nullptr, &last);
    seal.sequence = last.sequence + 1;
    seal.own_checksum = checksum_of(seal);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::memcpy(&page_->seals[index][at == 0 ? 1 : 0], &seal, sizeof seal);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ControlPage::unseal(std::size_t index) noexcept {
    for (Seal &place : page_->seals[index]) {
        std::memset(&place, 0, sizeof place);
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

std::optional<Seal> ControlPage::sealed(std::size_t index, const std::array<std::uint8_t, 16> &owner) const noexcept {
    Seal found{};
    return current(page_->seals[index], &owner, &found) < 0 ? std::nullopt : std::optional<Seal>(found);
}

}  // namespace elasticstate
