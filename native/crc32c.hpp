#pragma once

#include <cstddef>
#include <cstdint>

namespace elasticstate {

/// Returns the CRC-32C (Castagnoli) of `size` bytes, continued from `crc`, which is 0 at the start.
std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t size) noexcept;

/// Does the same, and copies the bytes in the same pass. `large`: part of a copy that exceeds all caches, so the stores
/// bypass the caches where possible. Call finish_copies() before other threads or processes may read the copy.
std::uint32_t crc32c_copy(std::uint32_t crc, void *to, const void *from, std::size_t size, bool large) noexcept;

/// Smallest size of a large copy, in bytes.
constexpr std::size_t LARGE_COPY = std::size_t{4} << 20;

/// Makes the copies of this thread visible to each reader that sees its later stores.
void finish_copies() noexcept;

/// Returns the checksum of two runs of bytes end to end, from both checksums and the size of the second run.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::size_t second_size) noexcept;

/// Table for second runs of one size, with which to combine takes some nanoseconds instead of a microsecond.
class Crc32cShift {
public:
    explicit Crc32cShift(std::size_t second_size) noexcept;
    std::uint32_t combine(std::uint32_t first, std::uint32_t second) const noexcept {
        return table_[0][first & 0xff] ^ table_[1][(first >> 8) & 0xff] ^ table_[2][(first >> 16) & 0xff] ^
               table_[3][first >> 24] ^ second;
    }

private:
    std::uint32_t table_[4][256];
};

/// crc32c without special instructions, for comparison in tests.
std::uint32_t crc32c_by_table(std::uint32_t crc, const void *data, std::size_t size) noexcept;

}  // namespace elasticstate
