// The checksum: known values, and the processor's way against the table's on all kinds of lengths and alignments.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "crc32c.hpp"

using namespace elasticstate;
using Bytes = std::vector<std::uint8_t>;

namespace {

/// Bit by bit, as the definition has it.
std::uint32_t by_definition(const Bytes &data) {
    std::uint32_t crc = 0xffffffff;
    for (const std::uint8_t byte : data) {
        crc ^= byte;
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78 : 0);
        }
    }
    return ~crc;
}

Bytes random_bytes(std::size_t size, std::mt19937_64 &random) {
    Bytes data(size);
    std::generate(data.begin(), data.end(), [&] { return static_cast<std::uint8_t>(random()); });
    return data;
}

void check_known(const Bytes &data, std::uint32_t expected) {
    CHECK(by_definition(data) == expected);
    CHECK(crc32c(0, data.data(), data.size()) == expected);
    CHECK(crc32c_by_table(0, data.data(), data.size()) == expected);
}

void known_values() {  // RFC 3720, B.4, and the catalogues' "check"
    Bytes ascending(32), descending(32);
    for (std::uint8_t i = 0; i < 32; ++i) {
        ascending[i] = i;
        descending[i] = static_cast<std::uint8_t>(31 - i);
    }
    check_known(Bytes(32, 0), 0x8a9136aa);
    check_known(Bytes(32, 0xff), 0x62a8ab43);
    check_known(ascending, 0x46dd794e);
    check_known(descending, 0x113fdb5c);
    check_known({'1', '2', '3', '4', '5', '6', '7', '8', '9'}, 0xe3069283);
    check_known({}, 0);
}

/// One length at one alignment: all ways agree, and a copy is whole and touches nothing else.
void check_way(const Bytes &data, std::size_t from, std::size_t size, std::size_t to, bool large) {
    const Bytes part(data.data() + from, data.data() + from + size);
    const std::uint32_t before = data[0], expected = crc32c_by_table(before, part.data(), size);
    CHECK(crc32c(before, data.data() + from, size) == expected);
    Bytes target(to + size + 64, 0xee);
    CHECK(crc32c_copy(before, target.data() + to, data.data() + from, size, large) == expected);
    finish_copies();
    CHECK(std::equal(part.begin(), part.end(), target.data() + to));
    CHECK(std::all_of(target.data(), target.data() + to, [](int byte) { return byte == 0xee; }));
    CHECK(std::all_of(target.end() - 64, target.end(), [](int byte) { return byte == 0xee; }));
}

void all_ways_agree(std::mt19937_64 &random) {
    const Bytes data = random_bytes(40000, random);
    for (std::size_t size = 0; size < 200; ++size) {
        CHECK(by_definition(Bytes(data.data(), data.data() + size)) == crc32c(0, data.data(), size));
        check_way(data, 1 + random() % 64, size, random() % 64, size % 2 == 0);
    }
    for (const std::size_t around : {960, 1920, 4032, 8064, 12096}) {  // where one kind of run ends and another begins
        for (std::size_t size = around - 10; size < around + 10; ++size) {
            check_way(data, 1 + random() % 64, size, random() % 64, true);
            check_way(data, 1 + random() % 64, size, random() % 64, false);
        }
    }
    for (int i = 0; i < 500; ++i) {
        check_way(data, 1 + random() % 10000, random() % 30000, random() % 128, random() % 2 == 0);
    }
}

void parts_put_together_are_the_whole(std::mt19937_64 &random) {
    const Bytes data = random_bytes(10000, random);
    const std::uint32_t whole = crc32c(0, data.data(), data.size());
    for (int i = 0; i < 200; ++i) {
        const std::size_t cut = random() % (data.size() + 1);
        const std::uint32_t first = crc32c(0, data.data(), cut);
        const std::uint32_t second = crc32c(0, data.data() + cut, data.size() - cut);
        CHECK(crc32c_combine(first, second, data.size() - cut) == whole);
        CHECK(crc32c(first, data.data() + cut, data.size() - cut) == whole);
    }
    // Far more zeros than one could checksum here: 2^40 bytes and none more, in two ways.
    std::uint32_t far = crc32c_combine(whole, 0, std::size_t{1} << 40);
    std::uint32_t steps = whole;
    for (int i = 0; i < 16; ++i) {
        steps = crc32c_combine(steps, 0, std::size_t{1} << 36);
    }
    CHECK(far == steps);
}

}  // namespace

int main() {
    std::mt19937_64 random(3);
    known_values();
    all_ways_agree(random);
    parts_put_together_are_the_whole(random);
}
