#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "crc32c.hpp"

namespace elasticstate {

/// Plan for the copies between one flat buffer and other memory. It is made once and used for each commit.
///
/// It consists of pieces (address, size, offset in the buffer), ascending and without overlap. A piece without an
/// address means bytes that are in the buffer already. The caller guarantees that the addresses are valid; all else is
/// checked.
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

    /// Returns the pieces that are not empty and have an address.
    std::span<const Piece> all() const noexcept { return pieces_; }

    /// A piece that is not empty, with or without an address, and its number among all pieces.
    struct Numbered : Piece {
        std::size_t number;
        const Crc32cShift *shift;  // of its size; null: it is one of many sizes
    };
    std::span<const Numbered> numbered() const noexcept { return numbered_; }
    /// Number of all pieces, empty ones included.
    std::size_t count() const noexcept { return count_; }

private:
    std::vector<Piece> pieces_;
    std::vector<Numbered> numbered_;
    std::unordered_map<std::size_t, Crc32cShift> shifts_;  // by size; its elements do not move
    std::size_t count_;
};

/// A run of bytes in a buffer.
struct Range {
    std::size_t offset;
    std::size_t size;
};

// All of these use up to four threads, depending on the number of bytes. When they return, everything is written and
// visible to others. `checksum` is the CRC-32C of the bytes before `begin`; the result is that of the bytes before
// `end`.

/// Copies from the pieces into bytes [begin, end) of `buffer`, and checksums these in the same pass. Bytes that no
/// piece covers stay unchanged, and are part of the checksum.
std::uint32_t gather(std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end,
                     std::uint32_t checksum);

/// Does the same, and continues the checksum of each piece by the bytes of that piece in the range. `each` has room for
/// all pieces.
std::uint32_t gather_each(std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end,
                          std::uint32_t checksum, std::uint32_t *each);

/// Does the same without a checksum: reads and writes only the bytes of pieces.
void fill(std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end);

/// Does the reverse: copies bytes [begin, end) of `buffer` to the pieces.
std::uint32_t scatter(const std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end,
                      std::uint32_t checksum);

/// True if the bytes of all pieces are those at their places in `buffer`.
bool equal(const std::uint8_t *buffer, const Pieces &pieces);

/// Copies runs of `buffer` to the addresses of `runs`, in any order. Runs may overlap in the buffer, not at their addresses.
void copy_runs(const std::uint8_t *buffer, std::span<const Pieces::Piece> runs);

std::uint32_t checksum_of(const std::uint8_t *buffer, std::size_t begin, std::size_t end, std::uint32_t checksum);

/// Returns the checksum of each range.
std::vector<std::uint32_t> checksums_of(const std::uint8_t *buffer, std::span<const Range> ranges);

}  // namespace elasticstate
