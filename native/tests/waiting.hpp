#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

/// Waits in a library of its own, as torch's are. See waiting.cpp.
struct Waiting {
    std::mutex mutex;
    std::condition_variable condition;
    bool over = false;

    void wait();
    bool wait_for(std::chrono::milliseconds limit);
    void finish();
};
