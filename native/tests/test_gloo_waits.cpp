// A wait that nobody would wake is left by an exception, with its mutex held and no trace in its condition variable.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.hpp"
#include "gloo_waits.hpp"

using namespace elasticstate;
using namespace std::chrono_literals;

namespace {

/// What an operation waits with; gone as soon as it is over, as Gloo's are.
struct Operation {
    std::mutex mutex;
    std::condition_variable condition;
    bool over = false;

    void wait_for(std::chrono::seconds limit) {
        std::unique_lock lock(mutex);
        condition.wait_for(lock, limit, [this] { return over; });
    }
    void wait() {
        std::unique_lock lock(mutex);
        condition.wait(lock, [this] { return over; });
    }
    void finish() {
        const std::lock_guard lock(mutex);
        over = true;
        condition.notify_all();
    }
};

void wake_until(GlooWaits &waits, const std::atomic<bool> &done) {
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (!done) {
        CHECK(std::chrono::steady_clock::now() < deadline);
        waits.wake();
        std::this_thread::sleep_for(3ms);
    }
}

void a_forgotten_wait_is_left_by_an_exception() {
    for (int round = 0; round < 20; ++round) {
        std::atomic<bool> done{false};
        std::string caught;
        std::thread sleeper([&] {
            pthread_setname_np(pthread_self(), "pt_gloo_runloop");
            for (int operation = 0; operation < 2; ++operation) {  // the thread goes on, and can be woken again
                auto waited = std::make_unique<Operation>();
                try {
                    waited->wait_for(100s);
                } catch (...) {
                    try {
                        std::rethrow_exception(std::current_exception());
                    } catch (const std::runtime_error &error) {
                        caught += error.what()[0];
                    }
                }
                CHECK(waited->mutex.try_lock());
                waited->mutex.unlock();
            }  // a condition variable that had a waiter left would not let itself be destroyed
            done = true;
        });
        GlooWaits waits;
        wake_until(waits, done);
        sleeper.join();
        CHECK(caught == "CC");
    }
}

void other_waits_are_left_alone() {
    Operation idle, others;
    std::atomic<int> ended{0};
    std::thread between_operations([&] {
        pthread_setname_np(pthread_self(), "pt_gloo_runloop");
        idle.wait();
        ++ended;
    });
    std::thread somebody_else([&] {
        others.wait_for(100s);
        ++ended;
    });
    GlooWaits waits;
    for (int i = 0; i < 100; ++i) {
        waits.wake();
        std::this_thread::sleep_for(3ms);
    }
    CHECK(ended == 0);
    idle.finish();
    others.finish();
    between_operations.join();
    somebody_else.join();
    CHECK(ended == 2);
}

void check_soon(bool busy) {
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (GlooWaits::busy() != busy) {
        CHECK(std::chrono::steady_clock::now() < deadline);
        std::this_thread::sleep_for(1ms);
    }
}

void check_stays_busy() {
    check_soon(true);
    for (int i = 0; i < 30; ++i) {
        CHECK(GlooWaits::busy());
        std::this_thread::sleep_for(1ms);
    }
}

/// Whatever such a thread does, it is busy, unless it waits for its next operation.
void a_thread_rests_only_between_operations() {
    Operation begin, network, end;
    std::mutex tensors;
    std::unique_lock lock(tensors);
    std::atomic<bool> computes{true};
    std::thread thread([&] {
        pthread_setname_np(pthread_self(), "pt_gloo_runloop");
        begin.wait();
        network.wait_for(100s);
        while (computes) {
        }
        const std::lock_guard wait(tensors);
        end.wait();
    });
    check_soon(false);
    begin.finish();
    check_stays_busy();
    network.finish();
    check_stays_busy();
    computes = false;
    check_stays_busy();
    lock.unlock();
    check_soon(false);
    end.finish();
    thread.join();
}

void who_cannot_be_woken_ends_itself() {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::signal(SIGRTMIN + 10, [](int) {});  // the user has taken the signal
        std::thread([] {
            pthread_setname_np(pthread_self(), "pt_gloo_runloop");
            Operation().wait_for(100s);
        }).detach();
        GlooWaits waits;
        wake_until(waits, std::atomic<bool>(false));
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

}  // namespace

int main() {
#if defined(__SANITIZE_THREAD__)
    return 0;  // puts frames of its own around each wait and each handler
#endif
    who_cannot_be_woken_ends_itself();  // first: the handler is installed once
    a_forgotten_wait_is_left_by_an_exception();
    other_waits_are_left_alone();
    a_thread_rests_only_between_operations();
}
