// Sets of sockets that look as Gloo's do: what is cut, and what is not. To be built with sanitizers.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "../gloo_sockets.hpp"
#include "../proc_fds.hpp"
#include "check.hpp"

using namespace elasticstate;

namespace {

constexpr std::uint64_t POINTER = 0x7f0000001000;

sockaddr_in address_of(int fd) {
    sockaddr_in address{};
    socklen_t size = sizeof address;
    CHECK(getsockname(fd, reinterpret_cast<sockaddr *>(&address), &size) == 0);
    return address;
}

Descriptor listen_on_loopback(int backlog = 64) {
    Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(bind(listener.get(), reinterpret_cast<sockaddr *>(&address), sizeof address) == 0);
    CHECK(listen(listener.get(), backlog) == 0);
    return listener;
}

/// Two ends of a TCP connection.
struct Pair {
    explicit Pair(int listener) {
        const sockaddr_in address = address_of(listener);
        near = Descriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        CHECK(connect(near.get(), reinterpret_cast<const sockaddr *>(&address), sizeof address) == 0);
        far = Descriptor(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
        CHECK(far);
    }
    /// Whether bytes still come through.
    bool lives() const {
        char byte = 1;
        return send(near.get(), &byte, 1, MSG_NOSIGNAL) == 1 && recv(far.get(), &byte, 1, 0) == 1;
    }
    Descriptor near, far;
};

void watch(int epoll, int fd, std::uint64_t data) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = data;
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
}

/// An epoll set with a listener and pairs, registered by pointers as Gloo does, or by numbers as an event loop does.
struct Device {
    Device(std::size_t count, bool pointers) : listener(listen_on_loopback()), epoll(epoll_create1(EPOLL_CLOEXEC)) {
        watch(epoll.get(), listener.get(), pointers ? POINTER : static_cast<std::uint64_t>(listener.get()));
        for (std::size_t i = 0; i < count; ++i) {
            pairs.emplace_back(listener.get());
            const int fd = pairs.back().near.get();
            watch(epoll.get(), fd, pointers ? POINTER + 64 * i : static_cast<std::uint64_t>(fd));
        }
    }
    bool listens() const {
        const Pair late(listener.get());
        return late.lives();
    }
    Descriptor listener;
    Descriptor epoll;
    std::vector<Pair> pairs;
};

void test_what_proc_says() {
    const Device device(300, true);  // more than one buffer of /proc takes
    std::vector<Watched> watched;
    list_watched(device.epoll.get(), watched);
    CHECK(watched.size() == 301);
    std::set<int> fds;
    for (const Watched &one : watched) {
        CHECK(one.data >= POINTER);
        CHECK(one.inode == socket_inode(one.fd));
        fds.insert(one.fd);
    }
    for (const Pair &pair : device.pairs) {
        CHECK(fds.count(pair.near.get()) == 1);
    }
    std::vector<int> all;
    list_fds(all);
    CHECK(all.size() >= 602);
    std::vector<int> epolls;
    list_epoll_fds(epolls);
    CHECK(epolls == std::vector<int>{device.epoll.get()});
    list_watched(device.listener.get(), watched);
    CHECK(watched.empty());
    list_watched(99999, watched);
    CHECK(watched.empty());
}

void test_only_what_is_the_groups_own_is_cut() {
    const Device before(2, true);
    GlooSockets sockets;
    CHECK(sockets.begin_group(3));
    const Device own(2, true), loop(2, false);
    sockets.end_group();
    CHECK(!sockets.broken());
    sockets.sever();
    for (const Pair &pair : own.pairs) {
        CHECK(!pair.lives());
    }
    for (const Device *device : {&before, &loop}) {
        for (const Pair &pair : device->pairs) {
            CHECK(pair.lives());
        }
    }
    CHECK(own.listens() && before.listens() && loop.listens());
    CHECK(sockets.broken());
    CHECK(!sockets.begin_group(3));
}

void test_a_lost_pair_is_a_broken_group() {
    GlooSockets sockets;
    CHECK(sockets.begin_group(3));
    Device own(2, true);
    sockets.end_group();
    CHECK(!sockets.broken());
    own.pairs[1].far.close();
    std::array<char, 1> byte{};
    CHECK(recv(own.pairs[1].near.get(), byte.data(), 1, 0) == 0);
    CHECK(sockets.broken());
    sockets.forget();
    CHECK(!sockets.broken());
}

void test_a_descriptor_that_is_another_by_now_is_not_touched() {
    GlooSockets sockets;
    CHECK(sockets.begin_group(2));
    auto own = std::make_unique<Device>(1, true);
    sockets.end_group();
    const int epoll_fd = own->epoll.get();
    own.reset();
    const Device other(4, true);  // takes the same numbers
    CHECK(other.epoll.get() == epoll_fd || other.listener.get() == epoll_fd || other.listener.get() < epoll_fd);
    sockets.sever();
    for (const Pair &pair : other.pairs) {
        CHECK(pair.lives());
    }
}

/// Who waits to accept hears from each peer that has not come, and a full queue holds nobody up for long.
void test_pending_pairs_are_rejected() {
    constexpr std::size_t SIZE = 5;
    GlooSockets sockets;
    CHECK(sockets.begin_group(SIZE));
    const Device pending(0, true);
    sockets.sever();
    std::set<std::int64_t> heard;
    for (std::size_t i = 0; i < SIZE; ++i) {
        const Descriptor caller(accept4(pending.listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
        std::int64_t sequence = -1;
        CHECK(recv(caller.get(), &sequence, sizeof sequence, MSG_WAITALL) == sizeof sequence);
        CHECK(recv(caller.get(), &sequence, 1, 0) == 0);
        heard.insert(sequence);
    }
    CHECK(heard == (std::set<std::int64_t>{0, 1, 2, 3, 4}));
    sockets.end_group();
}

void test_a_full_queue_holds_nobody_up() {
    GlooSockets sockets;
    CHECK(sockets.begin_group(1000));
    const Descriptor listener = listen_on_loopback(1), epoll(epoll_create1(EPOLL_CLOEXEC));
    watch(epoll.get(), listener.get(), POINTER);
    const auto begun = std::chrono::steady_clock::now();
    sockets.sever();
    CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(1));
    sockets.end_group();
}

void test_connections_to_the_store_are_cut() {
    const Descriptor store = listen_on_loopback(), elsewhere = listen_on_loopback();
    const Pair to_store(store.get()), to_elsewhere(elsewhere.get());
    GlooSockets sockets;
    sockets.watch_store("localhost", ntohs(address_of(store.get()).sin_port));
    sockets.sever();
    CHECK(!to_store.lives());
    CHECK(to_elsewhere.lives());
    const Pair late(store.get());
    CHECK(late.lives());
    sockets.sever();
    CHECK(!late.lives());
    const Pair later(store.get());
    sockets.forget();
    sockets.sever();
    CHECK(later.lives());
}

/// Groups come and go on one thread while another cuts.
void test_cutting_from_another_thread() {
    for (int round = 0; round < 20; ++round) {
        GlooSockets sockets;
        std::atomic<bool> stop{false};
        CHECK(sockets.begin_group(3));
        std::thread sweeper([&] {
            while (!stop) {
                sockets.sever();
                std::this_thread::sleep_for(std::chrono::microseconds(100));  // else nobody else ever gets the mutex
            }
        });
        {
            const Device own(2, true);
            sockets.end_group();
            while (own.pairs[0].lives()) {
            }
            CHECK(sockets.broken());
        }
        sockets.forget();
        stop = true;
        sweeper.join();
    }
}

}  // namespace

int main() {
    test_what_proc_says();
    test_only_what_is_the_groups_own_is_cut();
    test_a_lost_pair_is_a_broken_group();
    test_a_descriptor_that_is_another_by_now_is_not_touched();
    test_pending_pairs_are_rejected();
    test_a_full_queue_holds_nobody_up();
    test_connections_to_the_store_are_cut();
    test_cutting_from_another_thread();
}
