// Built as libtorch_cpu.so: the library whose waits native/wait_clock.cpp measures has this name.
#include "waiting.hpp"

void gloo::fail() { throw IoException("timed out"); }

void gloo::fail_with(std::exception_ptr error) { std::rethrow_exception(error); }

void gloo::refuse_arguments() { throw std::invalid_argument("no tensor"); }

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
