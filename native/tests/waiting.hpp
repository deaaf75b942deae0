#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>

namespace gloo {

/// The exception of an operation that fails.
struct IoException : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Fails as an operation of Gloo does, in a library of its own.
void fail();
/// Fails with an error that a connection holds, as often as it is asked.
void fail_with(std::exception_ptr error);
void refuse_arguments();

}  // namespace gloo

/// Returns the host of this address, as torch shows it.
std::string host_of(const std::string &address);

/// Waits in a library of its own, as torch's are. See waiting.cpp.
struct Waiting {
    std::mutex mutex;
    std::condition_variable condition;
    bool over = false;

    void wait();
    bool wait_for(std::chrono::milliseconds limit);
    void finish();
};
