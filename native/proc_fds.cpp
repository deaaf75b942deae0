#include "proc_fds.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace elasticstate {
namespace {

constexpr char EPOLL[] = "anon_inode:[eventpoll]";

bool is_epoll(int fd) noexcept {
    std::array<char, 32> path{};
    std::array<char, sizeof EPOLL> target{};
    std::snprintf(path.data(), path.size(), "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(path.data(), target.data(), target.size());
    return length == sizeof EPOLL - 1 && std::memcmp(target.data(), EPOLL, sizeof EPOLL - 1) == 0;
}

void parse_line(const char *line, std::vector<Watched> &watched) {
    int fd = 0;
    unsigned events = 0;
    std::uint64_t data = 0, inode = 0;
    long long position = 0;
    if (std::sscanf(line, "tfd: %d events: %x data: %" SCNx64 " pos:%lld ino:%" SCNx64, &fd, &events, &data, &position,
                    &inode) == 5) {
        watched.push_back({fd, inode, data});
    }
}

}  // namespace

Descriptor &Descriptor::operator=(Descriptor &&other) noexcept {
    if (this != &other) {
        close();
        fd_ = other.release();
    }
    return *this;
}

int Descriptor::release() noexcept { return std::exchange(fd_, -1); }

void Descriptor::close() noexcept {
    if (fd_ >= 0) {
        ::close(release());
    }
}

void list_fds(std::vector<int> &fds) {
    fds.clear();
    const Descriptor directory(open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    alignas(dirent64) std::array<char, 8192> buffer;
    long size = 0;
    // opendir() would allocate and free its buffer each time; this runs every few milliseconds.
    while ((size = syscall(SYS_getdents64, directory.get(), buffer.data(), buffer.size())) > 0) {
        for (long at = 0; at < size;) {
            const auto *const entry = reinterpret_cast<const dirent64 *>(buffer.data() + at);
            at += entry->d_reclen;
            char *end = nullptr;
            const long fd = std::strtol(entry->d_name, &end, 10);
            if (*end == '\0' && end != entry->d_name && fd != directory.get()) {
                fds.push_back(static_cast<int>(fd));
            }
        }
    }
    std::sort(fds.begin(), fds.end());
}

void list_epoll_fds(std::vector<int> &fds) {
    list_fds(fds);
    std::erase_if(fds, [](int fd) { return !is_epoll(fd); });
}

void list_watched(int epoll_fd, std::vector<Watched> &watched) {
    watched.clear();
    std::array<char, 40> path{};
    std::snprintf(path.data(), path.size(), "/proc/self/fdinfo/%d", epoll_fd);
    const Descriptor info(open(path.data(), O_RDONLY | O_CLOEXEC));
    std::array<char, 4096> buffer;
    std::size_t kept = 0;
    ssize_t size = 0;
    while ((size = read(info.get(), buffer.data() + kept, buffer.size() - kept)) > 0) {
        const std::size_t filled = kept + static_cast<std::size_t>(size);
        char *line = buffer.data();
        char *const end = buffer.data() + filled;
        for (char *newline = nullptr; (newline = std::find(line, end, '\n')) != end; line = newline + 1) {
            *newline = '\0';
            parse_line(line, watched);
        }
        kept = static_cast<std::size_t>(end - line);
        if (kept == buffer.size()) {
            return;  // a line of 4 KB: no such file
        }
        std::memmove(buffer.data(), line, kept);
    }
}

std::uint64_t socket_inode(int fd) noexcept {
    struct stat found {};
    return fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode) ? found.st_ino : 0;
}

}  // namespace elasticstate
