#pragma once

#include <cstddef>
#include <cstdint>

namespace elasticstate {

/// CRC-32C (Castagnoli) of `size` bytes; `crc` is that of the bytes before them, 0 at the start.
std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t size) noexcept;

/// The same, and copies the bytes in the same pass. `large`: as part of a copy that no cache could hold, so the stores
/// go around the caches where that can be done; then finish_copies() has to follow before others are told.
std::uint32_t crc32c_copy(std::uint32_t crc, void *to, const void *from, std::size_t size, bool large) noexcept;

/// From this many bytes a copy is large.
constexpr std::size_t LARGE_COPY = std::size_t{4} << 20;

/// What this thread has copied is visible to whoever sees what it stores from now on.
void finish_copies() noexcept;

/// The checksum of two runs of bytes end to end, from the checksums of both and the size of the second.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::size_t second_size) noexcept;

/// crc32c without help from the processor, to hold the other one against.
std::uint32_t crc32c_by_table(std::uint32_t crc, const void *data, std::size_t size) noexcept;

}  // namespace elasticstate
