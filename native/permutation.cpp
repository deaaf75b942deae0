#include "permutation.hpp"

#include <algorithm>
#include <bit>

namespace elasticstate {

namespace {

// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

// The highest bits of a product depend on all bits of its factors.
std::uint64_t round_value(std::uint64_t half, std::uint64_t key, unsigned bits) {
    std::uint64_t z = (half ^ key) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 32)) * 0x94d049bb133111eb;
    return z >> (64 - bits);
}

}  // namespace

Permutation::Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t epoch) : n_(n), keys_{} {
    const unsigned bits = std::max(2u, static_cast<unsigned>(std::bit_width(n > 0 ? n - 1 : 0)));
    low_bits_ = bits / 2;
    high_bits_ = bits - low_bits_;
    std::uint64_t sequence = mix(mix(seed + 0x9e3779b97f4a7c15) + epoch);
    for (std::uint64_t &key : keys_) {
        key = mix(sequence += 0x9e3779b97f4a7c15);
    }
}

std::uint64_t Permutation::encrypt(std::uint64_t value) const {
    std::uint64_t low = value & ((std::uint64_t{1} << low_bits_) - 1);
    std::uint64_t high = value >> low_bits_;
    for (std::size_t round = 0; round < ROUNDS; round += 2) {
        low ^= round_value(high, keys_[round], low_bits_);
        high ^= round_value(low, keys_[round + 1], high_bits_);
    }
    return high << low_bits_ | low;
}

std::uint64_t Permutation::operator()(std::uint64_t position) const {
    std::uint64_t value = encrypt(position);
    while (value >= n_) {
        value = encrypt(value);
    }
    return value;
}

}  // namespace elasticstate
