#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace elasticstate {

/// Where the bytes of one flat buffer lie elsewhere in memory: a plan that is made once and used for each commit.
///
/// Made of pieces (address, size, offset in the buffer), ascending and not overlapping. A piece without an address
/// stands for bytes that are in the buffer already. That addresses are good for as long as they are used is the
/// caller's business; everything else is checked.
class Pieces {
public:
    struct Piece {
        std::uint8_t *address;
        std::size_t offset;
        std::size_t size;
    };

    /// Throws std::invalid_argument if lists differ in length, or pieces are out of order, overlap or are too large.
    Pieces(std::span<const std::uint64_t> addresses, std::span<const std::uint64_t> sizes,
           std::span<const std::uint64_t> offsets);

    /// The pieces that are not empty and have an address.
    std::span<const Piece> all() const noexcept { return pieces_; }

private:
    std::vector<Piece> pieces_;
};

/// A run of bytes in a buffer.
struct Range {
    std::size_t offset;
    std::size_t size;
};

// All of these use up to four threads, if the bytes are worth it, and return with everything written and visible to
// others. `checksum` is the CRC-32C of what comes before `begin`; the result is that of what comes before `end`.

/// Copies from the pieces into bytes [begin, end) of `buffer`, and checksums these in the same pass. What no piece
/// covers stays as it is and is checksummed too.
std::uint32_t gather(std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end,
                     std::uint32_t checksum);

/// The same without a checksum: only what the pieces cover is read and written.
void fill(std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end);

/// The reverse: copies bytes [begin, end) of `buffer` to the pieces.
std::uint32_t scatter(const std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end,
                      std::uint32_t checksum);

std::uint32_t checksum_of(const std::uint8_t *buffer, std::size_t begin, std::size_t end, std::uint32_t checksum);

/// The checksum of each range.
std::vector<std::uint32_t> checksums_of(const std::uint8_t *buffer, std::span<const Range> ranges);

}  // namespace elasticstate
