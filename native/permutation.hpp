// A random order of [0, n) that needs no memory: the index at each position is computed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace elasticstate {

// A keyed bijection on [0, n): a Feistel network (Luby and Rackoff, SIAM J. Comput. 17, 1988) over the smallest power
// of two that is not below n. Its two halves differ by at most a bit. It is repeated until the result is below n (Black
// and Rogaway, CT-RSA 2002), which takes fewer than two steps on average. It is for shuffling, not for secrets.
class Permutation {
public:
    Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t epoch);

    // Returns the index at this position, which must be below n.
    std::uint64_t operator()(std::uint64_t position) const;

private:
    static constexpr std::size_t ROUNDS = 10;

    std::uint64_t encrypt(std::uint64_t value) const;

    std::uint64_t n_;
    unsigned low_bits_;
    unsigned high_bits_;
    std::array<std::uint64_t, ROUNDS> keys_;
};

}  // namespace elasticstate
