#include "gather.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

namespace elasticstate {
namespace {

// Below this a thread's start costs more than it saves.
constexpr std::size_t MIN_BYTES_PER_THREAD = std::size_t{8} << 20;

/// Copies bytes [begin, end) of the pieces laid end to end.
void copy_range(std::uint8_t *destination, std::span<const Piece> pieces, std::size_t begin, std::size_t end) {
    std::size_t position = 0;
    for (const Piece &piece : pieces) {
        if (position >= end) {
            return;
        }
        const std::size_t from = std::max(begin, position) - position;
        const std::size_t to = std::min(end - position, piece.size);
        if (from < to) {
            std::memcpy(destination + piece.offset + from, piece.source + from, to - from);
        }
        position += piece.size;
    }
}

}  // namespace

void gather(std::uint8_t *destination, std::span<const Piece> pieces, std::size_t max_threads) {
    std::size_t total = 0;
    for (const Piece &piece : pieces) {
        total += piece.size;
    }
    const std::size_t worthwhile = std::min(total / MIN_BYTES_PER_THREAD, max_threads);
    const std::size_t threads = std::max<std::size_t>(worthwhile, 1);
    const std::size_t share = total / threads;
    std::vector<std::jthread> helpers;  // joined by their destructors, also when one cannot be started
    helpers.reserve(threads - 1);
    for (std::size_t i = 1; i < threads; ++i) {
        helpers.emplace_back(copy_range, destination, pieces, (i - 1) * share, i * share);
    }
    copy_range(destination, pieces, (threads - 1) * share, total);
}

}  // namespace elasticstate
