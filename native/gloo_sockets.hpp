#pragma once

#include <netinet/in.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "failed_collectives.hpp"
#include "gloo_waits.hpp"
#include "proc_fds.hpp"

namespace elasticstate {

/// Connections that a sentinel cuts. `sever` may be called from any thread, any number of times. It takes up to 0.1 s.
class Severable {
public:
    Severable() = default;
    Severable(const Severable &) = delete;
    Severable &operator=(const Severable &) = delete;
    virtual ~Severable() = default;
    virtual void sever() = 0;
};

/// The sockets of all Gloo groups of one generation. `sever` cuts them.
///
/// Gloo's own abort() and shutdown() return at once and unblock no thread (measured with torch 2.13). The loss of the
/// sockets does unblock a collective, a pending init_process_group or new_group, and a wait for the store:
///
///  - pairs: each Gloo device has its own epoll descriptor, and the `tfd:` lines of /proc/self/fdinfo/<epoll fd> list
///    exactly its listener and its pairs. The code duplicates a pair's descriptor, verifies its inode, and shuts the
///    duplicate down. So it never touches another socket that has got the same number meanwhile. It never shuts the
///    listener down: that would end the process.
///  - pending pairs: a rank that waits to *accept* from a dead peer waits for five time-outs. A peer sends to the
///    listener the 8-byte sequence number of the pair it connects to. So the code sends each of the numbers 0 … n-1 to
///    the own listener, on a connection that is then closed. A test checks this private detail of Gloo.
///  - waits for the store: the sockets whose peer is the store's address.
///  - operations that Gloo does not wake although their socket is gone: see gloo_waits.hpp.
///
/// A new device is found by comparing the epoll descriptors before and after the creation of a group. All functions may
/// be called from any thread.
class GlooSockets final : public Severable {
public:
    /// Makes `sever` also cut this process's connections to the store. Resolves a name here, once.
    void watch_store(const std::string &host, std::uint16_t port);
    /// Call it before a group of `size` ranks is created. False: the generation is cut already, so do not create it.
    bool begin_group(std::size_t size);
    /// Call it after the group was created, or after its creation has failed.
    void end_group();
    /// Call it after all groups were destroyed.
    void forget();

    /// Cuts all sockets. Level, not edge: call it repeatedly, because sockets may appear meanwhile.
    void sever() override;
    /// True if a pair of one of the groups has lost its connection, or `sever` has cut them.
    bool broken();
    /// True if an operation has failed in this process since the object exists; without FailedCollectives: if the
    /// groups were cut. Never becomes false again. It costs next to nothing.
    bool failed() const noexcept;
    /// The number of operations that have failed in this process since the object exists; 0 without FailedCollectives.
    std::uint64_t failures() const noexcept;
    /// True if a pair of the first group, which lives as long as the generation, has lost its connection. It costs one
    /// read of a file of /proc. Other groups may have ended on one rank before another one.
    bool lost();

private:
    /// One Gloo device: its epoll descriptor, identified by the inode of its listener; its pairs (0 if they connect
    /// later).
    struct Device {
        int epoll_fd;
        std::uint64_t listener_inode;
        std::size_t pairs;
    };
    struct Address {
        in6_addr host;  // IPv4 is mapped
        std::uint16_t port;
    };

    void note_devices();
    std::vector<Device> new_devices();
    bool existed_before(int epoll_fd, std::uint64_t listener_inode) const;
    bool lost_pair(const Device &device);
    void reject_pending(const Watched &listener);
    void cut_store();

    std::mutex mutex_;
    std::vector<Device> devices_;
    bool is_creating_ = false;  // a group is being created
    std::size_t size_in_creation_ = 0;
    bool connects_lazily_ = false;  // torch connects them at first use
    std::vector<std::pair<int, std::uint64_t>> devices_before_;  // epoll descriptors, and the inodes of their listeners
    std::size_t next_rejected_ = 0;
    std::vector<Address> store_;
    std::atomic<bool> severed_{false};
    const std::uint64_t failures_before_ = FailedCollectives::count();
    GlooWaits waits_;
    std::vector<int> fds_;  // memory for the descriptors that /proc lists
    std::vector<Watched> watched_;
};

}  // namespace elasticstate
