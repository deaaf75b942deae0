#include "crc32c.hpp"

#include <array>
#include <cstring>

namespace elasticstate {
namespace {

constexpr std::uint32_t POLYNOMIAL = 0x82f63b78;  // Castagnoli's, bits reversed: the highest bit stands for x^0

/// a * b modulo the polynomial.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = std::uint32_t{1} << 31; bit != 0; bit >>= 1) {
        product ^= (a & bit) ? b : 0;
        b = (b >> 1) ^ ((b & 1) ? POLYNOMIAL : 0);
    }
    return product;
}

/// x^(8 * 2^i) modulo the polynomial: by multiplication with it a checksum passes 2^i zero bytes.
constexpr std::array<std::uint32_t, 64> make_powers() {
    std::array<std::uint32_t, 64> powers{};
    std::uint32_t power = std::uint32_t{1} << (31 - 8);
    for (std::uint32_t &entry : powers) {
        entry = power;
        power = multiply(power, power);
    }
    return powers;
}

constexpr auto POWERS = make_powers();

/// x^(8 * bytes) modulo the polynomial.
constexpr std::uint32_t power_of(std::size_t bytes) {
    std::uint32_t power = std::uint32_t{1} << 31;
    for (std::size_t i = 0; bytes != 0; ++i, bytes >>= 1) {
        power = (bytes & 1) ? multiply(POWERS[i], power) : power;
    }
    return power;
}

constexpr std::array<std::uint32_t, 256> make_table() {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ ((crc & 1) ? POLYNOMIAL : 0);
        }
        table[byte] = crc;
    }
    return table;
}

constexpr auto TABLE = make_table();

}  // namespace

std::uint32_t crc32c_by_table(std::uint32_t crc, const void *data, std::size_t size) noexcept {
    const auto *byte = static_cast<const std::uint8_t *>(data);
    crc = ~crc;
    for (std::size_t i = 0; i < size; ++i) {
        crc = (crc >> 8) ^ TABLE[(crc ^ byte[i]) & 0xff];
    }
    return ~crc;
}

std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t size) noexcept {
    return crc32c_by_table(crc, data, size);
}

std::uint32_t crc32c_copy(std::uint32_t crc, void *to, const void *from, std::size_t size, bool) noexcept {
    std::memcpy(to, from, size);
    return crc32c(crc, from, size);
}

void finish_copies() noexcept {}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::size_t second_size) noexcept {
    return multiply(power_of(second_size), first) ^ second;
}

}  // namespace elasticstate
