#pragma once

#include <netinet/in.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gloo_waits.hpp"
#include "proc_fds.hpp"

namespace elasticstate {

/// What a sentinel cuts: `sever` may be called from any thread, any number of times, and is done within 0.1 s.
class Severable {
public:
    Severable() = default;
    Severable(const Severable &) = delete;
    Severable &operator=(const Severable &) = delete;
    virtual ~Severable() = default;
    virtual void sever() = 0;
};

/// The sockets of all Gloo groups of one generation, and how to cut them.
///
/// Gloo's own abort() and shutdown() return at once and unblock nobody (measured with torch 2.13). What does unblock a
/// collective, a pending init_process_group or new_group, and a store wait is the loss of the sockets underneath:
///
///  - pairs: each Gloo device has its own epoll descriptor, and the `tfd:` lines of /proc/self/fdinfo/<epoll fd> list
///    exactly its listener and its pairs. A pair's descriptor is duplicated, its identity checked by inode, and the
///    duplicate shut down, so that no foreign socket that has got the same number meanwhile is ever touched. Never the
///    listener: shutting that down ends the process.
///  - pending pairs: a rank that waits to *accept* from a dead peer waits for five time-outs. A peer introduces itself
///    on the listener with the 8-byte sequence number of the pair it connects to; so each of the numbers 0 … n-1 is
///    sent to the own listener on a connection that is then closed. A private detail of Gloo's wire, pinned by a test.
///  - store waits: the sockets whose peer is the store's address.
///  - what Gloo forgets to wake although its socket is gone: see gloo_waits.hpp.
///
/// A device is found by difference: the epoll descriptors after a group was made, minus those before. All calls may
/// come from any thread.
class GlooSockets final : public Severable {
public:
    /// From now on `sever` also cuts this process's connections to the store. A name is looked up here, once.
    void watch_store(const std::string &host, std::uint16_t port);
    /// A group of `size` ranks is about to be made. False: cut already, so do not make it.
    bool begin_group(std::size_t size);
    /// It has been made, or has failed to be.
    void end_group();
    /// All groups have been taken down.
    void forget();

    /// Cuts everything there is. Level, not edge: sockets may appear meanwhile, so call it again and again.
    void sever() override;
    /// Whether a pair of one of the groups has lost its connection, or all were cut here.
    bool broken();

private:
    /// One Gloo device: its epoll descriptor, known by the inode of its listener; its pairs (0 if they come later).
    struct Device {
        int epoll_fd;
        std::uint64_t listener_inode;
        std::size_t pairs;
    };
    struct Address {
        in6_addr host;  // IPv4 is mapped
        std::uint16_t port;
    };

    std::vector<Device> new_devices();
    bool lost_pair(const Device &device);
    void reject_pending(const Watched &listener);
    void cut_store();

    std::mutex mutex_;
    std::vector<Device> devices_;
    bool being_made_ = false;  // a group is
    std::size_t size_being_made_ = 0;
    bool pairs_come_later_ = false;  // torch connects them as they are used
    std::vector<int> epolls_before_;
    std::size_t next_rejected_ = 0;
    std::vector<Address> store_;
    bool severed_ = false;
    GlooWaits waits_;
    std::vector<int> fds_;  // memory for what /proc lists
    std::vector<Watched> watched_;
};

}  // namespace elasticstate
