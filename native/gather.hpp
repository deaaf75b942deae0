#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace elasticstate {

/// One piece of memory and its place in the destination, in bytes.
struct Piece {
    const std::uint8_t *source;
    std::size_t size;
    std::size_t offset;
};

/// Copies every piece to `destination + offset`. Bounds are the caller's business, and so is that nothing overlaps.
///
/// Large copies are split over up to `max_threads` threads, evenly by bytes: a model is a few large tensors and many
/// small ones, so a split by tensors would leave most threads idle.
void gather(std::uint8_t *destination, std::span<const Piece> pieces, std::size_t max_threads);

}  // namespace elasticstate
