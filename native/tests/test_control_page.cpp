// A reader beside a writer: stamps are of one moment, seals are whole or absent, and what a seal speaks of is there.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "check.hpp"
#include "control_page.hpp"

using namespace elasticstate;

namespace {

constexpr std::array<std::uint8_t, 16> ME{1, 2, 3}, OTHER{9};
constexpr std::uint64_t ROUNDS = 20'000;
constexpr std::uint64_t MEETINGS = 100;  // a writer goes on until the reader has seen so many changes, however slow

/// Memory with a descriptor, for a page to be mapped; and with a path, to be written otherwise.
class File {
public:
    explicit File(off_t size)
        : fd_(memfd_create("control", MFD_CLOEXEC)), path_("/proc/self/fd/" + std::to_string(fd_)) {
        CHECK(fd_ >= 0 && ftruncate(fd_, size) == 0);
    }
    ~File() { close(fd_); }
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    int fd() const { return fd_; }
    const std::string &path() const { return path_; }

private:
    int fd_;
    std::string path_;
};

/// All of a seal follows from one number, so that a mixture of two would show.
Seal seal_of(std::uint64_t n) {
    std::array<std::uint8_t, 16> tag{};
    tag.fill(static_cast<std::uint8_t>(n));
    return {ME, 0, n, n + 1, n + 2, n + 3, tag, static_cast<std::uint32_t>(n + 4), 0};
}

bool is_whole(const Seal &seal) {
    const Seal like = seal_of(seal.generation);
    return seal.owner == ME && seal.tick == like.tick && seal.layout == like.layout && seal.length == like.length &&
           seal.tag == like.tag && seal.checksum == like.checksum;
}

void stamps_are_never_mixed() {
    ControlPage page(std::nullopt);  // one mapping, so that the thread sanitizer knows who meets whom
    std::atomic<bool> done{false};
    std::atomic<std::uint64_t> seen{0}, rounds{0};
    std::jthread writer([&] {
        for (std::uint64_t generation = 1; generation <= ROUNDS || seen < MEETINGS; ++generation) {
            page.enter(generation);
            page.beat();
            for (int i = 0; generation % 2 == 1 && i < 5; ++i) {  // no ticks in those with an even number
                page.word().add_tick();
            }
            rounds = generation;
        }
        done = true;
    });
    std::uint64_t last = 0;
    while (!done) {
        const Stamp stamp = page.stamp();
        CHECK(stamp.generation >= last);
        CHECK(stamp.ticks <= (stamp.generation % 2 == 1 ? 5 : 0));
        CHECK(stamp.heartbeat + 1 >= stamp.generation);
        seen += stamp.generation != last;
        last = stamp.generation;
    }
    CHECK(page.stamp().generation == rounds);
}

void seals_are_whole_or_absent() {
    ControlPage page(std::nullopt);  // one mapping, so that the thread sanitizer knows who meets whom
    std::atomic<bool> done{false};
    std::uint64_t payload = 0;  // no atomic: what is written before a seal is there for those who see the seal
    std::atomic<std::uint64_t> seen{0}, rounds{0};
    std::jthread writer([&] {
        payload = 42;
        for (std::uint64_t n = 1; n <= ROUNDS || seen < MEETINGS; ++n) {
            if (n % 16 == 0) {
                page.unseal(1);
            }
            page.seal(1, seal_of(n));
            rounds = n;
        }
        done = true;
    });
    std::uint64_t last = 0;
    while (!done) {
        if (const auto seal = page.sealed(1, ME)) {
            CHECK(is_whole(*seal));
            CHECK(payload == 42);
            seen += seal->generation != last;
            last = seal->generation;
        }
        CHECK(!page.sealed(0, ME));
        CHECK(!page.sealed(1, OTHER));
    }
    CHECK(page.sealed(1, ME)->generation == rounds);
}

void one_maps_what_another_writes() {
    const File file(4096);
    ControlPage worker(file.fd());
    const ControlPage agent(file.fd());
    worker.enter(3);
    worker.word().add_tick();
    worker.seal(1, seal_of(8));
    CHECK(agent.stamp().generation == 3 && agent.stamp().ticks == 1);
    CHECK(is_whole(*agent.sealed(1, ME)));
}

void the_last_seal_counts_whoever_it_belongs_to() {
    ControlPage page(std::nullopt);
    Seal other = seal_of(2);
    other.owner = OTHER;
    page.seal(0, seal_of(1));
    page.seal(0, other);
    CHECK(!page.sealed(0, ME));  // the buffer is the other's now
    CHECK(page.sealed(0, OTHER)->generation == 2);
    page.unseal(0);
    CHECK(!page.sealed(0, OTHER) && !page.sealed(0, ME));
}

void a_reset_forgets_all_but_seals_even_in_the_middle_of_a_change() {
    ControlPage page(std::nullopt);
    page.seal(0, seal_of(7));
    page.enter(3);
    page.set_place(5);
    page.progress();
    page.word().add_tick();
    page.reset();
    const Stamp stamp = page.stamp();
    CHECK(stamp.generation == 0 && stamp.ticks == 0 && stamp.place == 0 && stamp.progress == 0);
    CHECK(page.generation() == 0 && page.place() == 0);
    CHECK(page.sealed(0, ME)->generation == 7);
}

void who_is_stopped_in_the_middle_of_a_change_has_no_ticks() {
    const File file(ControlPage::SIZE);
    ControlPage page(file.fd());
    page.enter(3);
    page.word().add_tick();
    CHECK(page.stamp().ticks == 1);
    constexpr std::uint64_t ODD = 3;  // the version after one change, and one more that has begun
    std::fstream raw(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    raw.seekp(offsetof(ControlLayout, version));
    raw.write(reinterpret_cast<const char *>(&ODD), sizeof ODD).flush();
    CHECK(raw.good());
    CHECK(page.stamp().generation == 3 && page.stamp().ticks == 0);
    page.enter(4);
    page.reset();
    page.word().add_tick();
    CHECK(page.stamp().generation == 0 && page.stamp().ticks == 1);
}

void points_are_whole_and_the_newest_stay() {
    ControlPage page(std::nullopt);
    std::atomic<bool> done{false};
    std::atomic<std::uint64_t> seen{0};
    std::uint64_t written = 0;
    std::jthread writer([&] {
        while (written < ROUNDS || seen < MEETINGS) {
            ++written;
            page.add_point({written, 2 * written, 3 * written});
        }
        done = true;
    });
    std::uint64_t since = 0, last = 0;
    while (!done) {
        for (const Point &point : page.points(since)) {
            CHECK(point.generation > last);
            CHECK(point.tick == 2 * point.generation && point.own_us == 3 * point.generation);
            last = point.generation;
            ++seen;
        }
    }
    writer.join();
    since = 0;
    CHECK(page.points(since).size() == POINTS - 1 && since == written);
    CHECK(page.points(since).empty());
    page.reset();
    page.add_point({1, 2, 3});
    CHECK(page.points(since).size() == 1);  // of a new process
}

void what_is_no_page_is_refused() {
    bool refused = false;
    try {
        const File file(100);
        ControlPage page(file.fd());
    } catch (const std::invalid_argument &) {
        refused = true;
    }
    CHECK(refused);
    refused = false;
    try {
        ControlPage page(-1);
    } catch (const std::system_error &error) {
        refused = error.code() == std::errc::bad_file_descriptor;
    }
    CHECK(refused);
}

}  // namespace

int main() {
    stamps_are_never_mixed();
    seals_are_whole_or_absent();
    one_maps_what_another_writes();
    the_last_seal_counts_whoever_it_belongs_to();
    a_reset_forgets_all_but_seals_even_in_the_middle_of_a_change();
    who_is_stopped_in_the_middle_of_a_change_has_no_ticks();
    points_are_whole_and_the_newest_stay();
    what_is_no_page_is_refused();
}
