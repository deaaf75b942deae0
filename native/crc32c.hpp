#pragma once

#include <cstddef>
#include <cstdint>

namespace elasticstate {

/// CRC-32C (Castagnoli) of `size` bytes; `crc` is that of the bytes before them, 0 at the start.
std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t size) noexcept;

}  // namespace elasticstate
