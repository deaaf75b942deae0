// Copies between a buffer and pieces, with their checksum: against a plain loop, on random plans and ranges.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "crc32c.hpp"
#include "pieces.hpp"

using namespace elasticstate;
using Bytes = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

namespace {

void fill(std::uint8_t *at, std::size_t size, Random &random) {
    std::uint64_t state = random();  // quicker than `random`, which matters under a sanitizer
    for (std::size_t i = 0; i < size; i += sizeof state) {
        state = state * 6364136223846793005 + 1442695040888963407;
        const std::uint64_t word = state ^ (state >> 32);
        std::memcpy(at + i, &word, std::min(sizeof word, size - i));
    }
}

/// Random pieces, each in memory of its own (so that a byte too many is found), and the buffer that they belong to.
struct Plan {
    std::vector<std::unique_ptr<std::uint8_t[]>> memory;
    std::vector<std::uint64_t> addresses, sizes, offsets;
    Bytes buffer;

    Plan(const std::vector<std::size_t> &piece_sizes, Random &random) {
        std::size_t end = 0;
        for (const std::size_t size : piece_sizes) {
            end += random() % 4 == 0 ? random() % 100 : 0;
            const bool there_already = random() % 8 == 0;
            memory.push_back(std::make_unique<std::uint8_t[]>(size));
            fill(memory.back().get(), size, random);
            addresses.push_back(there_already ? 0 : reinterpret_cast<std::uint64_t>(memory.back().get()));
            sizes.push_back(size);
            offsets.push_back(end);
            end += size;
        }
        buffer.resize(end + random() % 100);
        fill(buffer.data(), buffer.size(), random);
    }

    Bytes all_pieces() const {
        Bytes all;
        for (std::size_t i = 0; i < memory.size(); ++i) {
            all.insert(all.end(), memory[i].get(), memory[i].get() + sizes[i]);
        }
        return all;
    }
};

void check_gather(Plan &plan, std::size_t begin, std::size_t end) {
    const std::uint32_t before = crc32c(0, plan.buffer.data(), begin);
    Bytes again = plan.buffer, expected = plan.buffer;
    for (std::size_t i = 0; i < plan.memory.size(); ++i) {
        const std::size_t from = std::max<std::size_t>(begin, plan.offsets[i]);
        const std::size_t to = std::min<std::size_t>(end, plan.offsets[i] + plan.sizes[i]);
        if (plan.addresses[i] != 0 && from < to) {
            std::memcpy(expected.data() + from, plan.memory[i].get() + (from - plan.offsets[i]), to - from);
        }
    }
    const Pieces pieces(plan.addresses, plan.sizes, plan.offsets);
    const std::uint32_t crc = gather(plan.buffer.data(), pieces, begin, end, before);
    CHECK(plan.buffer == expected);
    CHECK(crc == crc32c(before, expected.data() + begin, end - begin));
    CHECK(checksum_of(plan.buffer.data(), begin, end, before) == crc);

    std::vector<std::uint32_t> each(pieces.count());
    const std::size_t middle = begin + (end - begin) / 3;  // in two parts, which cut a piece
    const std::uint32_t first = gather_each(again.data(), pieces, begin, middle, before, each.data());
    CHECK(gather_each(again.data(), pieces, middle, end, first, each.data()) == crc);
    CHECK(again == expected);
    for (std::size_t i = 0; i < each.size(); ++i) {
        const std::size_t from = std::clamp<std::size_t>(plan.offsets[i], begin, end);
        const std::size_t to = std::clamp<std::size_t>(plan.offsets[i] + plan.sizes[i], begin, end);
        CHECK(each[i] == crc32c(0, expected.data() + from, to - from));
    }
}

void check_scatter(Plan &plan, std::size_t begin, std::size_t end, Random &random) {
    fill(plan.buffer.data(), plan.buffer.size(), random);
    const Bytes source = plan.buffer, before = plan.all_pieces();
    const Pieces pieces(plan.addresses, plan.sizes, plan.offsets);
    const std::uint32_t crc = scatter(plan.buffer.data(), pieces, begin, end, 0);
    CHECK(plan.buffer == source);
    CHECK(crc == crc32c(0, source.data() + begin, end - begin));

    // What lies in the range is the buffer's now, and all else is as it was.
    Bytes expected = before;
    std::size_t start = 0;
    for (std::size_t i = 0; i < plan.memory.size(); start += plan.sizes[i], ++i) {
        const std::size_t from = std::max<std::size_t>(begin, plan.offsets[i]);
        const std::size_t to = std::min<std::size_t>(end, plan.offsets[i] + plan.sizes[i]);
        if (plan.addresses[i] != 0 && from < to) {
            std::memcpy(expected.data() + start + (from - plan.offsets[i]), source.data() + from, to - from);
        }
    }
    CHECK(plan.all_pieces() == expected);
}

void check_range(Plan &plan, std::size_t begin, std::size_t end, Random &random) {
    check_gather(plan, begin, end);
    check_scatter(plan, begin, end, random);
}

void random_plans(Random &random) {
    for (int round = 0; round < 60; ++round) {
        std::vector<std::size_t> sizes(random() % 30);
        for (std::size_t &size : sizes) {
            size = random() % 3 == 0 ? random() % 9000 : random() % 100;
        }
        Plan plan(sizes, random);
        const std::size_t begin = random() % (plan.buffer.size() + 1);
        const std::size_t end = begin + random() % (plan.buffer.size() - begin + 1);
        check_range(plan, begin, end, random);
        check_range(plan, 0, plan.buffer.size(), random);
    }
}

/// So large that all threads take part, and stores go around the caches.
void large_plans(Random &random) {
    Plan one({(18 << 20) + 13}, random);
    check_range(one, 5, one.buffer.size(), random);
    std::vector<std::size_t> many(18'000, 1000);
    many[9000] = 5 << 20;
    Plan mixed(many, random);
    check_range(mixed, 0, mixed.buffer.size(), random);
}

void checksums_of_ranges(Random &random) {
    Bytes buffer(17 << 20);
    fill(buffer.data(), buffer.size(), random);
    std::vector<Range> ranges{{0, 0}, {0, buffer.size()}, {3, 9 << 20}, {1 << 20, 1}};
    for (int i = 0; i < 300; ++i) {
        ranges.push_back({random() % (1 << 20), random() % 5000});
    }
    const std::vector<std::uint32_t> found = checksums_of(buffer.data(), ranges);
    CHECK(found.size() == ranges.size());
    for (std::size_t i = 0; i < ranges.size(); ++i) {
        CHECK(found[i] == crc32c(0, buffer.data() + ranges[i].offset, ranges[i].size));
    }
}

using Numbers = std::vector<std::uint64_t>;

void check_refused(const Numbers &addresses, const Numbers &sizes, const Numbers &offsets, const char *why) {
    try {
        const Pieces pieces(addresses, sizes, offsets);
    } catch (const std::invalid_argument &error) {
        CHECK(std::string(error.what()).find(why) != std::string::npos);
        return;
    }
    CHECK(!"refused");
}

void bad_plans() {
    check_refused({1}, {1}, {}, "1 addresses, 1 sizes and 0 offsets");
    check_refused({1, 1}, {5, 5}, {0, 4}, "piece 1: offset 4 lies before the last one's end, 5");
    check_refused({1, 1}, {5, 5}, {9, 0}, "piece 1");
    check_refused({1}, {~std::uint64_t{0}}, {8}, "piece 0: offset 8 and size 18446744073709551615 are too large");
    check_refused({1}, {8}, {~std::uint64_t{0}}, "too large");
    const Numbers addresses{0, 1, 1}, sizes{5, 0, 7}, offsets{0, 5, 5};
    const Pieces pieces(addresses, sizes, offsets);
    CHECK(pieces.all().size() == 1);
}

void equality(Random &random) {
    Plan plan({std::size_t{9} << 20, 1, 0, 77, std::size_t{5} << 20}, random);
    const Pieces pieces(plan.addresses, plan.sizes, plan.offsets);
    gather(plan.buffer.data(), pieces, 0, plan.buffer.size(), 0);
    CHECK(equal(plan.buffer.data(), pieces));
    for (const Pieces::Piece &piece : pieces.all()) {
        for (const std::size_t at : {std::size_t{0}, piece.size / 2, piece.size - 1}) {
            piece.address[at] ^= 1;
            CHECK(!equal(plan.buffer.data(), pieces));
            piece.address[at] ^= 1;
        }
    }
    CHECK(equal(plan.buffer.data(), pieces));
    CHECK(equal(plan.buffer.data(), Pieces({}, {}, {})));
}

void runs(Random &random) {
    Bytes buffer(std::size_t{30} << 20);
    fill(buffer.data(), buffer.size(), random);
    for (const std::size_t most : {std::size_t{100}, std::size_t{9} << 20}) {
        std::vector<Bytes> targets;
        std::vector<Pieces::Piece> parts;
        std::vector<std::size_t> offsets;
        for (int i = 0; i < 8; ++i) {
            targets.emplace_back(random() % most);
            offsets.push_back(random() % (buffer.size() - targets.back().size()));
        }
        for (std::size_t i = 0; i < targets.size(); ++i) {
            parts.push_back({targets[i].data(), offsets[i], targets[i].size()});
        }
        copy_runs(buffer.data(), parts);
        for (std::size_t i = 0; i < targets.size(); ++i) {
            CHECK(std::equal(targets[i].begin(), targets[i].end(), buffer.data() + offsets[i]));
        }
    }
}

}  // namespace

int main() {
    Random random(5);
    equality(random);
    runs(random);
    bad_plans();
    random_plans(random);
    large_plans(random);
    checksums_of_ranges(random);
}
