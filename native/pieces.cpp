#include "pieces.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "crc32c.hpp"
#include "in_parallel.hpp"

namespace elasticstate {
namespace {

constexpr std::size_t BLOCK = std::size_t{4} << 20;  // unit of work: small, so that no thread waits for a slow one
constexpr std::size_t MOST_SHIFTS = 256;  // pieces of more sizes take longer
constexpr std::size_t MAX_OFFSET = std::numeric_limits<std::int64_t>::max();

/// Calls work(0) ... work(count - 1), each once. The number of threads depends on the total of `bytes`.
template <typename Work>
void copy_in_parallel(std::size_t count, std::size_t bytes, const Work &work) {
    in_parallel(count, bytes, work, finish_copies);
}

/// Splits [begin, end) into blocks, and combines their checksums. `work(from, to)` returns the checksum of one block.
template <typename Work>
std::uint32_t by_blocks(std::size_t begin, std::size_t end, std::uint32_t checksum, const Work &work) {
    std::vector<std::uint32_t> parts((end - begin + BLOCK - 1) / BLOCK);
    const auto last = [&](std::size_t i) { return std::min(end, begin + (i + 1) * BLOCK); };
    copy_in_parallel(parts.size(), end - begin, [&](std::size_t i) { parts[i] = work(begin + i * BLOCK, last(i)); });
    for (std::size_t i = 0; i < parts.size(); ++i) {
        checksum = crc32c_combine(checksum, parts[i], last(i) - (begin + i * BLOCK));
    }
    return checksum;
}

/// Visits [begin, end) in order: calls `copied(piece, from, size)` for pieces, and `kept(from, size)` between them.
template <typename Piece, typename Copied, typename Kept>
void walk(std::span<const Piece> pieces, std::size_t begin, std::size_t end, const Copied &copied,
          const Kept &kept) {
    const auto ends_before = [](const Piece &piece, std::size_t at) { return piece.offset + piece.size <= at; };
    auto piece = std::lower_bound(pieces.begin(), pieces.end(), begin, ends_before);
    std::size_t at = begin;
    for (; piece != pieces.end() && piece->offset < end; ++piece) {
        if (piece->offset > at) {
            kept(at, piece->offset - at);
            at = piece->offset;
        }
        const std::size_t to = std::min(end, piece->offset + piece->size);
        copied(*piece, at, to - at);
        at = to;
    }
    if (at < end) {
        kept(at, end - at);
    }
}

[[noreturn]] void refuse(std::size_t i, const std::string &why) {
    throw std::invalid_argument("piece " + std::to_string(i) + ": " + why);
}

}  // namespace

Pieces::Pieces(std::span<const std::uint64_t> addresses, std::span<const std::uint64_t> sizes,
               std::span<const std::uint64_t> offsets)
    : count_(addresses.size()) {
    if (addresses.size() != sizes.size() || addresses.size() != offsets.size()) {
        throw std::invalid_argument(std::to_string(addresses.size()) + " addresses, " + std::to_string(sizes.size()) +
                                    " sizes and " + std::to_string(offsets.size()) + " offsets");
    }
    pieces_.reserve(addresses.size());
    numbered_.reserve(addresses.size());
    std::size_t end = 0;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
        if (offsets[i] > MAX_OFFSET || sizes[i] > MAX_OFFSET - offsets[i]) {
            refuse(i, "offset " + std::to_string(offsets[i]) + " and size " + std::to_string(sizes[i]) +
                          " are too large");
        }
        if (offsets[i] < end) {
            refuse(i, "offset " + std::to_string(offsets[i]) + " lies before the last one's end, " +
                          std::to_string(end));
        }
        end = offsets[i] + sizes[i];
        const Piece piece{reinterpret_cast<std::uint8_t *>(addresses[i]), offsets[i], sizes[i]};
        if (sizes[i] > 0 && addresses[i] != 0) {
            pieces_.push_back(piece);
        }
        if (sizes[i] > 0) {
            auto shift = shifts_.find(sizes[i]);
            if (shift == shifts_.end() && shifts_.size() < MOST_SHIFTS) {
                shift = shifts_.try_emplace(sizes[i], sizes[i]).first;
            }
            numbered_.push_back({piece, i, shift == shifts_.end() ? nullptr : &shift->second});
        }
    }
}

std::uint32_t gather(std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end,
                     std::uint32_t checksum) {
    const bool large = end - begin > LARGE_COPY;
    return by_blocks(begin, end, checksum, [&](std::size_t from, std::size_t to) {
        std::uint32_t crc = 0;
        walk(
            pieces.all(), from, to,
            [&](const Pieces::Piece &piece, std::size_t at, std::size_t size) {
                crc = crc32c_copy(crc, buffer + at, piece.address + (at - piece.offset), size, large);
            },
            [&](std::size_t at, std::size_t size) { crc = crc32c(crc, buffer + at, size); });
        return crc;
    });
}

std::uint32_t gather_each(std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end,
                          std::uint32_t checksum, std::uint32_t *each) {
    struct Part {  // of a piece that is cut by the range or by the ends of blocks
        std::size_t number;
        std::uint32_t checksum;
        std::size_t size;
    };
    const bool large = end - begin > LARGE_COPY;
    std::vector<std::vector<Part>> cut((end - begin + BLOCK - 1) / BLOCK);
    checksum = by_blocks(begin, end, checksum, [&](std::size_t from, std::size_t to) {
        std::uint32_t crc = 0;
        walk(
            pieces.numbered(), from, to,
            [&](const Pieces::Numbered &piece, std::size_t at, std::size_t size) {
                const std::uint32_t own =
                    piece.address == nullptr
                        ? crc32c(0, buffer + at, size)
                        : crc32c_copy(0, buffer + at, piece.address + (at - piece.offset), size, large);
                if (size == piece.size) {
                    each[piece.number] = own;
                } else {
                    cut[(from - begin) / BLOCK].push_back({piece.number, own, size});
                }
                const bool is_usual = size == piece.size && piece.shift != nullptr;
                crc = is_usual ? piece.shift->combine(crc, own) : crc32c_combine(crc, own, size);
            },
            [&](std::size_t at, std::size_t size) { crc = crc32c(crc, buffer + at, size); });
        return crc;
    });
    for (const std::vector<Part> &parts : cut) {
        for (const Part &part : parts) {
            each[part.number] = crc32c_combine(each[part.number], part.checksum, part.size);
        }
    }
    return checksum;
}

void fill(std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end) {
    const std::size_t blocks = (end - begin + BLOCK - 1) / BLOCK;
    std::size_t bytes = 0;
    for (const Pieces::Piece &piece : pieces.all()) {
        bytes += piece.size;
    }
    copy_in_parallel(blocks, bytes, [&](std::size_t i) {
        walk(
            pieces.all(), begin + i * BLOCK, std::min(end, begin + (i + 1) * BLOCK),
            [&](const Pieces::Piece &piece, std::size_t at, std::size_t size) {
                std::memcpy(buffer + at, piece.address + (at - piece.offset), size);
            },
            [](std::size_t, std::size_t) {});
    });
}

std::uint32_t scatter(const std::uint8_t *buffer, const Pieces &pieces, std::size_t begin, std::size_t end,
                      std::uint32_t checksum) {
    const bool large = end - begin > LARGE_COPY;
    return by_blocks(begin, end, checksum, [&](std::size_t from, std::size_t to) {
        std::uint32_t crc = 0;
        walk(
            pieces.all(), from, to,
            [&](const Pieces::Piece &piece, std::size_t at, std::size_t size) {
                crc = crc32c_copy(crc, piece.address + (at - piece.offset), buffer + at, size, large);
            },
            [&](std::size_t at, std::size_t size) { crc = crc32c(crc, buffer + at, size); });
        return crc;
    });
}

bool equal(const std::uint8_t *buffer, const Pieces &pieces) {
    const std::span<const Pieces::Piece> all = pieces.all();
    if (all.empty()) {
        return true;
    }
    const std::size_t begin = all.front().offset, end = all.back().offset + all.back().size;
    std::atomic<bool> differs{false};
    copy_in_parallel((end - begin + BLOCK - 1) / BLOCK, end - begin, [&](std::size_t i) {
        walk(
            all, begin + i * BLOCK, std::min(end, begin + (i + 1) * BLOCK),
            [&](const Pieces::Piece &piece, std::size_t at, std::size_t size) {
                if (!differs && std::memcmp(buffer + at, piece.address + (at - piece.offset), size) != 0) {
                    differs = true;
                }
            },
            [](std::size_t, std::size_t) {});
    });
    return !differs;
}

void copy_runs(const std::uint8_t *buffer, std::span<const Pieces::Piece> runs) {
    std::vector<Pieces::Piece> parts;  // large runs are split into blocks, so that all threads have about equal work
    std::size_t bytes = 0;
    for (const Pieces::Piece &run : runs) {
        for (std::size_t done = 0; done < run.size; done += BLOCK) {
            parts.push_back({run.address + done, run.offset + done, std::min(BLOCK, run.size - done)});
        }
        bytes += run.size;
    }
    copy_in_parallel(parts.size(), bytes, [&](std::size_t i) {
        std::memcpy(parts[i].address, buffer + parts[i].offset, parts[i].size);
    });
}

std::uint32_t checksum_of(const std::uint8_t *buffer, std::size_t begin, std::size_t end, std::uint32_t checksum) {
    return by_blocks(begin, end, checksum, [&](std::size_t from, std::size_t to) {
        return crc32c(0, buffer + from, to - from);
    });
}

std::vector<std::uint32_t> checksums_of(const std::uint8_t *buffer, std::span<const Range> ranges) {
    std::vector<Range> parts;  // large ranges are split into blocks, so that all threads have about equal work
    std::size_t bytes = 0;
    for (const Range &range : ranges) {
        for (std::size_t done = 0; done < range.size; done += BLOCK) {
            parts.push_back({range.offset + done, std::min(BLOCK, range.size - done)});
        }
        bytes += range.size;
    }
    std::vector<std::uint32_t> found(parts.size());
    copy_in_parallel(parts.size(), bytes,
                     [&](std::size_t i) { found[i] = crc32c(0, buffer + parts[i].offset, parts[i].size); });
    std::vector<std::uint32_t> results;
    results.reserve(ranges.size());
    std::size_t next = 0;
    for (const Range &range : ranges) {
        std::uint32_t crc = 0;
        for (std::size_t done = 0; done < range.size; done += BLOCK, ++next) {
            crc = crc32c_combine(crc, found[next], parts[next].size);
        }
        results.push_back(crc);
    }
    return results;
}

}  // namespace elasticstate
