#pragma once

#include <cstdint>
#include <vector>

namespace elasticstate {

/// An owned file descriptor; -1: none.
class Descriptor {
public:
    Descriptor() = default;
    explicit Descriptor(int fd) noexcept : fd_(fd) {}
    Descriptor(Descriptor &&other) noexcept : fd_(other.release()) {}
    Descriptor &operator=(Descriptor &&other) noexcept;
    ~Descriptor() { close(); }

    int get() const noexcept { return fd_; }
    explicit operator bool() const noexcept { return fd_ >= 0; }
    int release() noexcept;
    void close() noexcept;

private:
    int fd_ = -1;
};

/// One descriptor in an epoll set: its number when it was added, and its inode, because a number may be reused.
struct Watched {
    int fd;
    std::uint64_t inode;
    std::uint64_t data;  // registered with the descriptor
};

/// Lists all open descriptors of this process, ascending. `fds` is emptied first, and keeps its memory.
void list_fds(std::vector<int> &fds);

/// Lists the epoll descriptors of this process, ascending.
void list_epoll_fds(std::vector<int> &fds);

/// Lists the descriptors in an epoll set, from /proc/self/fdinfo; empty if `fd` is not an epoll descriptor (any more).
void list_watched(int epoll_fd, std::vector<Watched> &watched);

/// Returns the inode of the socket with this number; 0: it is not a socket.
std::uint64_t socket_inode(int fd) noexcept;

}  // namespace elasticstate
