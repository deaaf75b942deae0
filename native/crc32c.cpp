#include "crc32c.hpp"

#include <array>

namespace elasticstate {
namespace {

constexpr std::uint32_t POLYNOMIAL = 0x82f63b78;  // Castagnoli's, bits reversed

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

std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t size) noexcept {
    const auto *byte = static_cast<const std::uint8_t *>(data);
    crc = ~crc;
    for (std::size_t i = 0; i < size; ++i) {
        crc = (crc >> 8) ^ TABLE[(crc ^ byte[i]) & 0xff];
    }
    return ~crc;
}

}  // namespace elasticstate
