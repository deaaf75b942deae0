// Thousands of schedules of three workers with their real sentinels: all leave at the same tick, and nothing races.
// To be built with -fsanitize=thread, and with -fsanitize=address,undefined.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../agent_messages.hpp"
#include "../sentinel.hpp"
#include "check.hpp"

using namespace elasticstate;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t GENERATION = 7;
constexpr std::size_t WORKERS = 3;

void no_pause() {}

/// Counts how often it is cut.
class Counted final : public Severable {
public:
    void sever() override { ++count; }
    std::atomic<int> count{0};
};

template <class Condition>
void wait_for(Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (!condition()) {
        CHECK(std::chrono::steady_clock::now() < deadline);
        std::this_thread::sleep_for(1ms);
    }
}

/// A worker in a generation; the test is its agent.
class Worker {
public:
    Worker() : Worker(pair()) {}
    ~Worker() {
        sentinel.reset();
        close(agent);
    }

    void tell(MessageKind kind, std::uint64_t generation, std::uint64_t tick = 0) const {
        const MessageHead head{kind, generation, tick};
        CHECK(send(agent, &head, sizeof head, MSG_NOSIGNAL) == sizeof head);
    }

    std::string hear() const {
        pollfd ready{agent, POLLIN, 0};
        CHECK(poll(&ready, 1, 20'000) == 1);
        std::string message(4096, '\0');
        const ssize_t size = recv(agent, message.data(), message.size(), 0);
        CHECK(size > 0);
        message.resize(static_cast<std::size_t>(size));
        return message;
    }

    /// The ticks of the next HoldAnswer.
    std::uint64_t answer() const {
        const std::string tag = agent_messages::begin("HoldAnswer", 4);
        for (;;) {
            const std::string message = hear();
            if (message.compare(0, tag.size(), tag) == 0) {
                std::uint64_t ticks = 0;
                for (std::size_t i = 0; i < 8; ++i) {
                    ticks = ticks << 8 | static_cast<unsigned char>(message.at(tag.size() + 10 + i));
                }
                CHECK(message == agent_messages::hold_answer(GENERATION, ticks, false, 0));
                return ticks;
            }
        }
    }

    TickEnd tick() const {
        const std::uint64_t ticks = sentinel->count_tick();
        return ticks == 0 ? TickEnd::go_on : sentinel->end_of_tick(ticks);
    }

    int agent;
    ControlPage page{std::nullopt};
    std::shared_ptr<Counted> cut = std::make_shared<Counted>();
    std::unique_ptr<Sentinel> sentinel;

private:
    static std::array<int, 2> pair() {
        std::array<int, 2> ends{};
        CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()) == 0);
        return ends;
    }
    explicit Worker(std::array<int, 2> ends)
        : agent(ends[0]), sentinel(std::make_unique<Sentinel>(page, ends[1], &no_pause)) {
        sentinel->enter(GENERATION, cut);
        sentinel->start();
    }
};

/// Something short of unknown length: nothing, some spinning, giving the processor away, or a little sleep.
class Pauses {
public:
    explicit Pauses(std::uint32_t seed) : random_(seed) {}
    void operator()() {
        switch (random_() % 8) {
            case 0:
                std::this_thread::yield();
                break;
            case 1:
                std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
                break;
            case 2:
            case 3:
                for (std::uint32_t i = random_() % 500; i > 0; --i) {
                    std::atomic_signal_fence(std::memory_order_seq_cst);
                }
                break;
            default:
                break;
        }
    }

private:
    std::mt19937 random_;
};

/// One hold and END(at K). With collectives, nobody begins a tick before all have ended the last one.
/// Returns whether some worker's answer was behind another's.
bool all_leave_at_the_same_tick(std::uint32_t seed, bool collectives) {
    std::array<Worker, WORKERS> workers;
    std::array<std::atomic<std::uint64_t>, WORKERS> left_at{};
    std::barrier collective(WORKERS);
    std::atomic<int> begun{0};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < WORKERS; ++i) {
        threads.emplace_back([&, i] {
            Pauses pause(seed * WORKERS + static_cast<std::uint32_t>(i));
            ++begun;
            TickEnd end = TickEnd::go_on;
            while (end == TickEnd::go_on) {
                pause();
                if (collectives) {
                    collective.arrive_and_wait();
                }
                end = workers[i].tick();
            }
            CHECK(end == TickEnd::interrupted);
            left_at[i] = workers[i].sentinel->ticks();
        });
    }
    wait_for([&] { return begun == WORKERS; });
    Pauses pause(seed);
    std::array<std::uint64_t, WORKERS> answers{};
    for (const Worker &worker : workers) {
        pause();
        worker.tell(MessageKind::hold, GENERATION);
    }
    for (std::size_t i = 0; i < WORKERS; ++i) {
        answers[i] = workers[i].answer();
    }
    const std::uint64_t last = 1 + *std::max_element(answers.begin(), answers.end());
    for (const Worker &worker : workers) {
        pause();
        worker.tell(MessageKind::end_at, GENERATION, last);
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    for (const std::atomic<std::uint64_t> &tick : left_at) {
        CHECK(tick == last);
    }
    return *std::min_element(answers.begin(), answers.end()) + 1 < last;
}

void test_schedules(bool collectives, std::uint32_t count) {
    int apart = 0;
    for (std::uint32_t seed = 0; seed < count; ++seed) {
        apart += all_leave_at_the_same_tick(seed, collectives) ? 1 : 0;
    }
    CHECK(apart > static_cast<int>(count) / 100);  // else the schedules were too tame to show anything
}

/// HOLD and RELEASE again and again under a worker that ticks: it is never left standing.
void test_holds_that_are_released() {
    Worker worker;
    std::atomic<bool> stop{false};
    std::thread thread([&] {
        while (!stop) {
            CHECK(worker.tick() == TickEnd::go_on);
        }
    });
    for (int i = 0; i < 2000; ++i) {
        worker.tell(MessageKind::hold, GENERATION);
        const std::uint64_t ticks = worker.answer();
        CHECK(worker.sentinel->ticks() <= ticks + 1);
        worker.tell(MessageKind::release, GENERATION);
    }
    const std::uint64_t ticks = worker.sentinel->ticks();
    wait_for([&] { return worker.sentinel->ticks() > ticks + 10; });
    stop = true;
    thread.join();
}

/// END now under a worker that ticks, says and looks: it stops, and the cutting goes on until it has left.
void test_an_end_now() {
    for (int i = 0; i < 200; ++i) {
        Worker worker;
        std::thread thread([&] {
            TickEnd end = TickEnd::go_on;
            while (end == TickEnd::go_on) {
                worker.sentinel->send(agent_messages::first(1, 0.5, 0.25));
                CHECK(worker.sentinel->in_generation());
                end = worker.tick();
            }
            CHECK(end == TickEnd::ended);
        });
        worker.tell(MessageKind::end_now, GENERATION);
        thread.join();
        const int cuts = worker.cut->count;
        wait_for([&] { return worker.cut->count > cuts + 1; });
        worker.sentinel->left();
        CHECK(!worker.sentinel->in_generation());
        worker.sentinel->enter(GENERATION + 1, worker.cut);
        CHECK(worker.tick() == TickEnd::go_on);
    }
}

/// An agent that does not read: nothing is lost, nothing blocks, the order is kept.
void test_an_agent_that_does_not_read() {
    Worker worker;
    constexpr std::uint64_t COUNT = 5000;
    for (std::uint64_t i = 0; i < COUNT; ++i) {
        worker.sentinel->send(agent_messages::first(i, 0.5, 0.25));
    }
    const std::uint64_t heartbeats = worker.page.stamp().heartbeat;
    wait_for([&] { return worker.page.stamp().heartbeat > heartbeats + 1; });
    for (std::uint64_t i = 0; i < COUNT; ++i) {
        CHECK(worker.hear() == agent_messages::first(i, 0.5, 0.25));
    }
}

/// A wait that is given up by what `pause` throws.
struct Interrupted {};
void test_a_wait_is_given_up() {
    std::array<int, 2> ends{};
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()) == 0);
    ControlPage page{std::nullopt};
    Sentinel sentinel(page, ends[1], [] { throw Interrupted(); });
    sentinel.start();
    bool given_up = false;
    try {
        sentinel.wait_other();
    } catch (const Interrupted &) {
        given_up = true;
    }
    CHECK(given_up);
    const std::string message(sizeof(MessageHead), '\0');
    CHECK(send(ends[0], message.data(), message.size(), 0) == static_cast<ssize_t>(message.size()));
    wait_for([&] {
        try {
            return sentinel.wait_other() == message;
        } catch (const Interrupted &) {
            return false;
        }
    });
    sentinel.set_place(Place::done);  // else it would end this process with its agent
    close(ends[0]);
}

/// Of a signal that is a notice the agent is told once, and of no other.
void test_a_notice() {
    Worker worker;
    worker.sentinel->notice(SIGUSR1);
    const std::array<unsigned char, 4> numbers{SIGTERM, SIGUSR1, SIGUSR1, 43};
    CHECK(write(worker.sentinel->signal_fd(), numbers.data(), numbers.size()) == 4);
    CHECK(worker.hear() == agent_messages::notice(SIGUSR1));
    worker.tell(MessageKind::hold, GENERATION);
    CHECK(worker.answer() == 0);
}

}  // namespace

int main() {
    test_schedules(true, 1000);
    test_schedules(false, 300);
    test_holds_that_are_released();
    test_an_end_now();
    test_an_agent_that_does_not_read();
    test_a_wait_is_given_up();
    test_a_notice();
}
