#include "file_map.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "in_parallel.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // linux/mman.h since Linux 5.14
#endif

namespace elasticstate {
namespace {

constexpr std::size_t GROWTH = 4;  // a new layout of a sharded state makes a commit larger by the ratio of the sizes
constexpr std::size_t PART = std::size_t{16} << 20;

std::size_t page_size() noexcept { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::size_t to_pages(std::size_t size) noexcept { return (size + page_size() - 1) / page_size() * page_size(); }

[[noreturn]] void fail(const char *what) { throw std::system_error(errno, std::generic_category(), what); }

std::size_t size_of(int fd) {
    struct stat found {};
    if (fstat(fd, &found) != 0) {
        fail("fstat");
    }
    return static_cast<std::size_t>(found.st_size);
}

void *reserve(std::size_t size) noexcept {
    return mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

}  // namespace

FileMap::FileMap(int fd) {
    const std::size_t size = size_of(fd);
    if (size == 0) {
        return;
    }
    reserved_ = to_pages(size) * GROWTH;
    void *found = reserve(reserved_);
    if (found == MAP_FAILED) {  // a limit of the address space (RLIMIT_AS)
        reserved_ = to_pages(size);
        found = reserve(reserved_);
    }
    if (found == MAP_FAILED) {
        fail("mmap");
    }
    data_ = static_cast<std::uint8_t *>(found);
    try {
        grow(fd);
    } catch (...) {
        munmap(data_, reserved_);
        throw;
    }
}

FileMap::~FileMap() {
    if (data_ != nullptr) {
        munmap(data_, reserved_);
    }
}

bool FileMap::grow(int fd) {
    const std::size_t size = size_of(fd);
    const std::size_t begin = size_ / page_size() * page_size();  // the last page may have been mapped in part
    if (size <= size_ || data_ == nullptr || size > reserved_) {
        return size <= size_;
    }
    if (mmap(data_ + begin, size - begin, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
             static_cast<off_t>(begin)) == MAP_FAILED) {
        reserved_ = begin;  // the addresses behind it may be those of others now
        fail("mmap");
    }
    populate(data_ + begin, size - begin);
    size_ = size;
    return true;
}

void populate(std::uint8_t *memory, std::size_t size) {
    in_parallel((size + PART - 1) / PART, size, [&](std::size_t i) {
        std::uint8_t *const part = memory + i * PART;
        const std::size_t bytes = std::min(PART, size - i * PART);
        if (madvise(part, bytes, MADV_POPULATE_WRITE) != 0) {  // an older Linux: then a first write is a minor fault
            for (std::size_t at = 0; at < bytes; at += page_size()) {
                static_cast<void>(*static_cast<volatile const std::uint8_t *>(part + at));
            }
        }
    });
}

}  // namespace elasticstate
