// CRC-32C at the speed of memory: the processor's instruction takes three cycles, and one can begin in each cycle. So
// the code checksums three runs of bytes side by side, and combines them by a table (V. Gopal et al., "Fast CRC
// Computation for iSCSI Polynomial Using CRC32 Instruction", Intel 2011; M. Adler's crc32c.c, 2013). To combine is to
// multiply by a power of x modulo the polynomial, as in crc32_combine() of zlib.
#include "crc32c.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

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

/// x^(8 * 2^i) modulo the polynomial.
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

/// x^(8 * bytes) modulo the polynomial: a checksum times this is the checksum after as many zero bytes.
constexpr std::uint32_t power_of(std::size_t bytes) {
    std::uint32_t power = std::uint32_t{1} << 31;
    for (std::size_t i = 0; bytes != 0; ++i, bytes >>= 1) {
        power = (bytes & 1) ? multiply(POWERS[i], power) : power;
    }
    return power;
}

/// Tables of the effect that each of the eight bytes of a word has on the checksum. [7] is for the word's first byte.
using Slices = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Slices make_slices() {
    Slices slices{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ ((crc & 1) ? POLYNOMIAL : 0);
        }
        slices[0][byte] = crc;
    }
    for (std::size_t i = 1; i < slices.size(); ++i) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t crc = slices[i - 1][byte];
            slices[i][byte] = (crc >> 8) ^ slices[0][crc & 0xff];
        }
    }
    return slices;
}

constexpr Slices SLICES = make_slices();

std::uint64_t load(const std::uint8_t *from) noexcept {
    std::uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

/// Eight bytes at a time: M. Kounavis, F. Berry, "Novel Table Lookup-Based Algorithms for High-Performance CRC
/// Generation", 2008. `crc` is the register, not yet inverted.
std::uint32_t by_table(std::uint32_t crc, const std::uint8_t *from, std::size_t size) noexcept {
    if constexpr (std::endian::native == std::endian::little) {
        for (; size >= 8; size -= 8, from += 8) {
            const std::uint64_t word = load(from) ^ crc;
            crc = 0;
            for (std::size_t i = 0; i < 8; ++i) {
                crc ^= SLICES[7 - i][(word >> (8 * i)) & 0xff];
            }
        }
    }
    for (; size > 0; --size, ++from) {
        crc = (crc >> 8) ^ SLICES[0][(crc ^ *from) & 0xff];
    }
    return crc;
}

#if defined(__x86_64__) || defined(__aarch64__)

#if defined(__x86_64__)
#if defined(__clang__)
#define WITH_CRC __attribute__((target("sse4.2,crc32")))
#else
#define WITH_CRC __attribute__((target("sse4.2")))
#endif
bool detect() noexcept { return __builtin_cpu_supports("sse4.2"); }
WITH_CRC inline std::uint64_t step(std::uint64_t crc, std::uint64_t word) noexcept { return _mm_crc32_u64(crc, word); }
WITH_CRC inline std::uint64_t step_byte(std::uint64_t crc, std::uint8_t byte) noexcept {
    return _mm_crc32_u8(static_cast<std::uint32_t>(crc), byte);
}
void stream(std::uint8_t *to, std::uint64_t word) noexcept {
    _mm_stream_si64(reinterpret_cast<long long *>(to), static_cast<long long>(word));
}
#else
#define WITH_CRC __attribute__((target("+crc")))
bool detect() noexcept { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
WITH_CRC inline std::uint64_t step(std::uint64_t crc, std::uint64_t word) noexcept {
    return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
WITH_CRC inline std::uint64_t step_byte(std::uint64_t crc, std::uint8_t byte) noexcept {
    return __crc32cb(static_cast<std::uint32_t>(crc), byte);
}
void stream(std::uint8_t *to, std::uint64_t word) noexcept { std::memcpy(to, &word, sizeof word); }
#endif

constexpr std::size_t LINE = 64;
// Runs are whole cache lines, so that each line is written at once by stores that go around the caches.
constexpr std::size_t LONG_RUN = 21 * LINE;  // three of them: a page, nearly
constexpr std::size_t SHORT_RUN = 5 * LINE;
constexpr std::size_t AHEAD = 4096;  // without prefetching, the next three runs arrive from memory line by line

enum class Mode { READ, COPY, STREAM };

template <Mode MODE>
inline void store(std::uint8_t *to, std::uint64_t word) noexcept {
    if constexpr (MODE == Mode::COPY) {
        std::memcpy(to, &word, sizeof word);
    } else if constexpr (MODE == Mode::STREAM) {
        stream(to, word);
    }
}

/// A checksum times a power of x, by table: a factor of each byte.
using Shift = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr Shift make_shift(std::size_t bytes) {
    Shift shift{};
    for (std::uint32_t i = 0; i < 4; ++i) {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            shift[i][byte] = multiply(power_of(bytes), byte << (8 * i));
        }
    }
    return shift;
}

template <std::size_t BYTES>
constexpr Shift SHIFT = make_shift(BYTES);

template <std::size_t BYTES>
inline std::uint64_t shifted(std::uint64_t crc) noexcept {
    const Shift &shift = SHIFT<BYTES>;
    return shift[0][crc & 0xff] ^ shift[1][(crc >> 8) & 0xff] ^ shift[2][(crc >> 16) & 0xff] ^ shift[3][crc >> 24];
}

/// Processes three runs of RUN bytes each.
template <Mode MODE, std::size_t RUN, bool PREFETCH>
WITH_CRC inline std::uint64_t three_runs(std::uint64_t crc, std::uint8_t *to, const std::uint8_t *from) noexcept {
    std::uint64_t second = 0, third = 0;
    for (std::size_t line = 0; line < RUN; line += LINE) {
        if constexpr (PREFETCH) {
            for (std::size_t i = 0; i < 3; ++i) {
                __builtin_prefetch(from + AHEAD + 3 * line + i * LINE);
            }
        }
        for (std::size_t i = line; i < line + LINE; i += 8) {
            const std::uint64_t a = load(from + i), b = load(from + RUN + i), c = load(from + 2 * RUN + i);
            crc = step(crc, a);
            second = step(second, b);
            third = step(third, c);
            store<MODE>(to + i, a);
            store<MODE>(to + RUN + i, b);
            store<MODE>(to + 2 * RUN + i, c);
        }
    }
    return shifted<RUN>(shifted<RUN>(crc) ^ second) ^ third;
}

template <Mode MODE>
WITH_CRC inline std::uint64_t by_bytes(std::uint64_t crc, std::uint8_t *to, const std::uint8_t *from,
                                       std::size_t size) noexcept {
    for (std::size_t i = 0; i < size; ++i) {
        crc = step_byte(crc, from[i]);
        if constexpr (MODE != Mode::READ) {
            to[i] = from[i];
        }
    }
    return crc;
}

template <Mode MODE>
WITH_CRC std::uint32_t by_hardware(std::uint64_t crc, std::uint8_t *to, const std::uint8_t *from,
                                   std::size_t size) noexcept {
    const auto advance = [&](std::size_t bytes) {
        from += bytes;
        to += MODE == Mode::READ ? 0 : bytes;
        size -= bytes;
    };
    if constexpr (MODE == Mode::STREAM) {
        const std::size_t head = std::min(size, -reinterpret_cast<std::uintptr_t>(to) % LINE);
        crc = by_bytes<MODE>(crc, to, from, head);
        advance(head);
    }
    while (size >= 3 * LONG_RUN) {
        crc = three_runs<MODE, LONG_RUN, true>(crc, to, from);
        advance(3 * LONG_RUN);
    }
    while (size >= 3 * SHORT_RUN) {
        crc = three_runs<MODE, SHORT_RUN, false>(crc, to, from);
        advance(3 * SHORT_RUN);
    }
    while (size >= 8) {
        const std::uint64_t word = load(from);
        crc = step(crc, word);
        store<MODE>(to, word);
        advance(8);
    }
    return static_cast<std::uint32_t>(by_bytes<MODE>(crc, to, from, size));
}

const bool HARDWARE = detect();

#endif

}  // namespace

std::uint32_t crc32c_by_table(std::uint32_t crc, const void *data, std::size_t size) noexcept {
    return ~by_table(~crc, static_cast<const std::uint8_t *>(data), size);
}

std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t size) noexcept {
#if defined(WITH_CRC)
    if (HARDWARE) {
        return ~by_hardware<Mode::READ>(~crc, nullptr, static_cast<const std::uint8_t *>(data), size);
    }
#endif
    return crc32c_by_table(crc, data, size);
}

std::uint32_t crc32c_copy(std::uint32_t crc, void *to, const void *from, std::size_t size, bool large) noexcept {
#if defined(WITH_CRC)
    if (HARDWARE) {
        auto *const target = static_cast<std::uint8_t *>(to);
        const auto *const source = static_cast<const std::uint8_t *>(from);
        return large ? ~by_hardware<Mode::STREAM>(~crc, target, source, size)
                     : ~by_hardware<Mode::COPY>(~crc, target, source, size);
    }
#endif
    static_cast<void>(large);
    std::memcpy(to, from, size);
    return crc32c_by_table(crc, to, size);
}

void finish_copies() noexcept {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::size_t second_size) noexcept {
    return multiply(power_of(second_size), first) ^ second;
}

Crc32cShift::Crc32cShift(std::size_t second_size) noexcept {
    const std::uint32_t power = power_of(second_size);
    for (std::uint32_t i = 0; i < 4; ++i) {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            table_[i][byte] = multiply(power, byte << (8 * i));
        }
    }
}

}  // namespace elasticstate
