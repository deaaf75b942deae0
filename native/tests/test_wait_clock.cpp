// The waits of the watched thread are measured, and no others; a worker's own time is its time without them.
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "control_page.hpp"
#include "pace.hpp"
#include "wait_clock.hpp"
#include "waiting.hpp"

using namespace elasticstate;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t MS = 1'000'000;

std::uint64_t measured(const auto &action) {
    const std::uint64_t before = WaitClock::waited_ns();
    action();
    return WaitClock::waited_ns() - before;
}

/// Returns as soon as a thread of this process sleeps in the kernel.
void wait_until_asleep(pid_t thread) {
    const std::string path = "/proc/self/task/" + std::to_string(thread) + "/stat";
    for (std::string text; text.find(") S ") == std::string::npos;) {
        std::this_thread::yield();
        std::getline(std::ifstream(path), text);
    }
}

void the_waits_of_the_watched_thread_count() {
    WaitClock::watch_this_thread();
    CHECK(measured([] {
              Waiting waiting;
              std::jthread other([&, waiter = gettid()] {
                  wait_until_asleep(waiter);
                  std::this_thread::sleep_for(20ms);
                  waiting.finish();
              });
              waiting.wait();
          }) >= 20 * MS);
    CHECK(measured([] {
              Waiting waiting;
              CHECK(!waiting.wait_for(20ms));
          }) >= 20 * MS);
    CHECK(measured([] { std::this_thread::sleep_for(20ms); }) == 0);
}

void the_waits_of_other_threads_do_not_count() {
    WaitClock::watch_this_thread();
    CHECK(measured([] {
              std::jthread([] {
                  Waiting waiting;
                  CHECK(!waiting.wait_for(5ms));
                  waiting.finish();
                  waiting.wait();
              });
          }) == 0);
}

std::vector<Point> points_of(ControlPage &page) {
    std::uint64_t since = 0;
    return page.points(since);
}

void own_time_is_time_without_waits() {
    ControlPage page(std::nullopt);
    Pace pace(page);
    pace.begin(3);
    std::uint64_t tick = 0;
    const auto ticks = [&](int count, auto own, auto waits) {
        for (int i = 0; i < count; ++i) {
            std::this_thread::sleep_for(own);
            Waiting waiting;
            waiting.wait_for(waits);
            pace.tick(++tick);
        }
    };
    ticks(8, 1ms, 100ms);
    const std::vector<Point> points = points_of(page);
    CHECK(points.size() == 4);  // those of the first ticks are missing
    CHECK(points.front().generation == 3 && points.front().tick == 5 && points.back().tick == 8);
    CHECK(points.back().own_us - points.front().own_us >= 3 * 1000);
    CHECK(points.back().own_us < 8 * 100 * 1000);
    std::this_thread::sleep_for(50ms);
    pace.resume();  // a hold is no own time
    const std::uint64_t before = points.back().own_us;
    Waiting waiting;
    waiting.wait_for(60ms);
    pace.tick(++tick);
    CHECK(points_of(page).back().own_us - before < 50 * 1000);
}

void short_ticks_share_a_point() {
    ControlPage page(std::nullopt);
    Pace pace(page);
    pace.begin(1);
    std::uint64_t tick = 0;
    while (tick < 2000) {
        pace.tick(++tick);
    }
    const std::vector<Point> few = points_of(page);
    CHECK(few.size() < 16);
    std::uint64_t number = few.size();
    while (page.points(number).empty()) {
        std::this_thread::sleep_for(1ms);
        pace.tick(++tick);
    }
    CHECK(tick % 2 == 0);
}

void the_first_of_long_ticks_ends_that() {
    ControlPage page(std::nullopt);
    Pace pace(page);
    pace.begin(1);
    std::uint64_t tick = 0;
    while (tick < 8) {
        pace.tick(++tick);
    }
    CHECK(points_of(page).back().tick == 8);  // after 5 and 6: the next one is 16
    std::this_thread::sleep_for(800ms);
    while (tick < 17) {
        pace.tick(++tick);
    }
    CHECK(points_of(page).back().tick == 17);
}

}  // namespace

int main() {
    {
        ControlPage page(std::nullopt);
        Pace pace(page);
        pace.begin(1);
        pace.tick(Pace::FIRST_TICK);
        CHECK(points_of(page).empty());  // nothing measures waits yet
    }
    CHECK(!WaitClock::is_installed());
    CHECK(WaitClock::install() && WaitClock::install() && WaitClock::is_installed());
    the_waits_of_the_watched_thread_count();
    the_waits_of_other_threads_do_not_count();
    own_time_is_time_without_waits();
    short_ticks_share_a_point();
    the_first_of_long_ticks_ends_that();
}
