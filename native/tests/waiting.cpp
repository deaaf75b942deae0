// Built as libtorch_cpu.so: the library whose waits native/wait_clock.cpp measures has this name.
#include "waiting.hpp"

#include <arpa/inet.h>
#include <netdb.h>

#include <array>

void gloo::fail() { throw IoException("timed out"); }

void gloo::fail_with(std::exception_ptr error) { std::rethrow_exception(error); }

void gloo::refuse_arguments() { throw std::invalid_argument("no tensor"); }

std::string host_of(const std::string &address) {
    sockaddr_in found{};
    found.sin_family = AF_INET;
    inet_pton(AF_INET, address.c_str(), &found.sin_addr);
    std::array<char, NI_MAXHOST> host{};
    const auto *generic = reinterpret_cast<const sockaddr *>(&found);
    getnameinfo(generic, sizeof found, host.data(), host.size(), nullptr, 0, NI_NUMERICSERV);
    return host.data();
}

void Waiting::wait() {
    std::unique_lock lock(mutex);
    condition.wait(lock, [this] { return over; });
}

bool Waiting::wait_for(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex);
    return condition.wait_for(lock, limit, [this] { return over; });
}

void Waiting::finish() {
    const std::lock_guard lock(mutex);
    over = true;
    condition.notify_all();
}
