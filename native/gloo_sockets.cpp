#include "gloo_sockets.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

namespace elasticstate {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t SMALLEST_POINTER = 1 << 20;  // Gloo registers pointers with epoll; Python and libuv, numbers
constexpr std::chrono::milliseconds REJECT_FOR{50};  // a listener whose queue is full must not delay the sentinel

int option(int fd, int level, int name) noexcept {
    int value = -1;
    socklen_t size = sizeof value;
    return getsockopt(fd, level, name, &value, &size) == 0 ? value : -1;
}

bool is_tcp(int fd) noexcept {
    const int domain = option(fd, SOL_SOCKET, SO_DOMAIN);
    return (domain == AF_INET || domain == AF_INET6) && option(fd, SOL_SOCKET, SO_TYPE) == SOCK_STREAM;
}

bool is_listener(int fd) noexcept { return option(fd, SOL_SOCKET, SO_ACCEPTCONN) == 1; }

bool is_established(int fd) noexcept {
    std::uint8_t state = 0;  // the first byte of struct tcp_info
    socklen_t size = sizeof state;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &state, &size) == 0 && state == TCP_ESTABLISHED;
}

/// Returns a duplicate of the TCP socket with this number and inode; none if the number belongs to another file by now.
Descriptor duplicate(int fd, std::uint64_t inode) noexcept {
    Descriptor copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy && (socket_inode(copy.get()) != inode || !is_tcp(copy.get()))) {
        copy.close();
    }
    return copy;
}

/// Calls `act` with a duplicate of each pair, that is of each TCP socket that does not listen.
template <class Act>
void for_each_pair(const std::vector<Watched> &watched, Act act) {
    for (const Watched &candidate : watched) {
        const Descriptor copy = duplicate(candidate.fd, candidate.inode);
        if (copy && !is_listener(copy.get())) {
            act(copy.get());
        }
    }
}

void cut_pairs(const std::vector<Watched> &watched) {
    for_each_pair(watched, [](int fd) { shutdown(fd, SHUT_RDWR); });
}

std::size_t count_pairs(const std::vector<Watched> &watched) {
    std::size_t count = 0;
    for_each_pair(watched, [&count](int fd) { count += is_established(fd) ? 1 : 0; });
    return count;
}

const Watched *listener_of(const std::vector<Watched> &watched) {
    const auto found = std::find_if(watched.begin(), watched.end(), [](const Watched &candidate) {
        const Descriptor copy = duplicate(candidate.fd, candidate.inode);
        return copy && is_listener(copy.get());
    });
    return found == watched.end() ? nullptr : &*found;
}

bool watches(const std::vector<Watched> &watched, std::uint64_t inode) {
    return std::any_of(watched.begin(), watched.end(), [inode](const Watched &w) { return w.inode == inode; });
}

/// Converts address and port to one form for both families. False: another family.
bool normalize(const sockaddr_storage &address, in6_addr &host, std::uint16_t &port) noexcept {
    if (address.ss_family == AF_INET) {
        const auto &v4 = reinterpret_cast<const sockaddr_in &>(address);
        host = in6_addr{};
        host.s6_addr[10] = host.s6_addr[11] = 0xff;
        std::memcpy(&host.s6_addr[12], &v4.sin_addr, 4);
        port = ntohs(v4.sin_port);
        return true;
    }
    if (address.ss_family == AF_INET6) {
        const auto &v6 = reinterpret_cast<const sockaddr_in6 &>(address);
        host = v6.sin6_addr;
        port = ntohs(v6.sin6_port);
        return true;
    }
    return false;
}

/// Connects to `address`, sends `sequence` and closes the connection. False: the remaining time was too short.
bool introduce(const sockaddr_storage &address, socklen_t size, std::int64_t sequence, Clock::time_point deadline) {
    const Descriptor caller(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!caller) {
        return true;
    }
    if (connect(caller.get(), reinterpret_cast<const sockaddr *>(&address), size) != 0) {
        if (errno != EINPROGRESS) {
            return true;
        }
        pollfd connected{caller.get(), POLLOUT, 0};
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
        if (poll(&connected, 1, std::max<int>(0, static_cast<int>(left.count()))) <= 0) {
            return false;
        }
    }
    // Fails when no process listens any more: then there is nothing to reject.
    [[maybe_unused]] const ssize_t sent = send(caller.get(), &sequence, sizeof sequence, MSG_NOSIGNAL);
    return true;
}

}  // namespace

void GlooSockets::watch_store(const std::string &host, std::uint16_t port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo *found = nullptr;
    std::vector<Address> addresses;
    if (getaddrinfo(host.c_str(), nullptr, &hints, &found) == 0) {
        const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, &freeaddrinfo);
        for (const addrinfo *info = list.get(); info != nullptr; info = info->ai_next) {
            sockaddr_storage address{};
            std::memcpy(&address, info->ai_addr, info->ai_addrlen);
            Address normal{};
            if (normalize(address, normal.host, normal.port)) {
                normal.port = port;
                addresses.push_back(normal);
            }
        }
    }
    const std::lock_guard lock(mutex_);
    store_ = std::move(addresses);
}

bool GlooSockets::begin_group(std::size_t size) {
    const std::lock_guard lock(mutex_);
    if (severed_) {
        return false;
    }
    note_devices();
    is_creating_ = true;
    size_in_creation_ = size;
    const char *const lazy = std::getenv("TORCH_GLOO_LAZY_INIT");  // torch reads it when it creates the group
    connects_lazily_ = lazy != nullptr && std::strcmp(lazy, "1") == 0;
    next_rejected_ = 0;
    return true;
}

void GlooSockets::end_group() {
    const std::lock_guard lock(mutex_);
    const std::vector<Device> made = new_devices();
    devices_.insert(devices_.end(), made.begin(), made.end());
    is_creating_ = false;
}

void GlooSockets::forget() {
    const std::lock_guard lock(mutex_);
    devices_.clear();
    store_.clear();
}

void GlooSockets::sever() {
    const std::lock_guard lock(mutex_);
    severed_ = true;
    for (const Device &device : devices_) {
        list_watched(device.epoll_fd, watched_);
        if (watches(watched_, device.listener_inode)) {
            cut_pairs(watched_);
        }
    }
    if (is_creating_) {
        for (const Device &device : new_devices()) {
            list_watched(device.epoll_fd, watched_);
            cut_pairs(watched_);
            if (const Watched *const listener = listener_of(watched_)) {
                reject_pending(*listener);
            }
        }
    }
    if (!store_.empty()) {
        cut_store();
    }
    waits_.wake();
}

bool GlooSockets::broken() {
    const std::lock_guard lock(mutex_);
    return severed_ ||
           std::any_of(devices_.begin(), devices_.end(), [this](const Device &device) { return lost_pair(device); });
}

bool GlooSockets::failed() const noexcept {
    return FailedCollectives::is_installed() ? FailedCollectives::count() != failures_before_ : severed_.load();
}

std::uint64_t GlooSockets::failures() const noexcept {
    return FailedCollectives::is_installed() ? FailedCollectives::count() - failures_before_ : 0;
}

bool GlooSockets::lost() {
    const std::lock_guard lock(mutex_);
    if (devices_.empty()) {
        return false;
    }
    const Device &first = devices_.front();
    list_watched(first.epoll_fd, watched_);
    // Gloo closes a pair that has lost its connection. The listener is not a pair.
    return watches(watched_, first.listener_inode) && watched_.size() - 1 < first.pairs;
}

bool GlooSockets::lost_pair(const Device &device) {
    list_watched(device.epoll_fd, watched_);
    // Without the listener, the descriptor belongs to another device: user code has destroyed the group.
    return watches(watched_, device.listener_inode) && count_pairs(watched_) < device.pairs;
}

/// Notes the epoll descriptors that exist, with their listeners: another thread may close one of them, so that its
/// number becomes that of a new device.
void GlooSockets::note_devices() {
    devices_before_.clear();
    list_epoll_fds(fds_);
    for (const int epoll_fd : fds_) {
        list_watched(epoll_fd, watched_);
        const Watched *const listener = listener_of(watched_);
        devices_before_.emplace_back(epoll_fd, listener == nullptr ? 0 : listener->inode);
    }
}

/// Finds the Gloo devices that have appeared since. Other epoll descriptors of this process look different.
std::vector<GlooSockets::Device> GlooSockets::new_devices() {
    std::vector<Device> found;
    list_epoll_fds(fds_);
    for (const int epoll_fd : fds_) {
        list_watched(epoll_fd, watched_);
        if (std::any_of(watched_.begin(), watched_.end(), [](const Watched &w) { return w.data < SMALLEST_POINTER; })) {
            continue;
        }
        const Watched *const listener = listener_of(watched_);
        if (listener != nullptr && !existed_before(epoll_fd, listener->inode)) {
            // Without lazy connections, no pairs mean: they were lost before the group was complete.
            const bool has_pairs = !connects_lazily_ || count_pairs(watched_) > 0;
            found.push_back({epoll_fd, listener->inode, has_pairs ? size_in_creation_ - 1 : 0});
        }
    }
    return found;
}

bool GlooSockets::existed_before(int epoll_fd, std::uint64_t listener_inode) const {
    return std::find(devices_before_.begin(), devices_before_.end(), std::pair(epoll_fd, listener_inode)) !=
           devices_before_.end();
}

/// Connects to the own listener in place of each peer that has not connected yet, and closes the connection.
void GlooSockets::reject_pending(const Watched &listener) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    const Descriptor copy = duplicate(listener.fd, listener.inode);
    if (!copy || getsockname(copy.get(), reinterpret_cast<sockaddr *>(&address), &size) != 0) {
        return;
    }
    const Clock::time_point deadline = Clock::now() + REJECT_FOR;
    for (std::size_t i = 0; i < size_in_creation_ && Clock::now() < deadline; ++i) {
        if (!introduce(address, size, static_cast<std::int64_t>(next_rejected_), deadline)) {
            return;  // the next sweep continues here
        }
        next_rejected_ = (next_rejected_ + 1) % size_in_creation_;
    }
}

void GlooSockets::cut_store() {
    list_fds(fds_);
    for (const int fd : fds_) {
        const std::uint64_t inode = socket_inode(fd);
        if (inode == 0) {
            continue;
        }
        const Descriptor copy = duplicate(fd, inode);
        sockaddr_storage address{};
        socklen_t size = sizeof address;
        Address peer{};
        if (copy && getpeername(copy.get(), reinterpret_cast<sockaddr *>(&address), &size) == 0 &&
            normalize(address, peer.host, peer.port) &&
            std::any_of(store_.begin(), store_.end(), [&peer](const Address &store) {
                return store.port == peer.port && std::memcmp(&store.host, &peer.host, sizeof peer.host) == 0;
            })) {
            shutdown(copy.get(), SHUT_RDWR);
        }
    }
}

}  // namespace elasticstate
