// The order is a bijection for every n, another one for each seed and epoch, and looks random.
#include "permutation.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "check.hpp"

using elasticstate::Permutation;

namespace {

std::vector<std::uint64_t> order(std::uint64_t n, std::uint64_t seed, std::uint64_t epoch) {
    const Permutation permutation(n, seed, epoch);
    std::vector<std::uint64_t> result;
    for (std::uint64_t i = 0; i < n; ++i) {
        result.push_back(permutation(i));
    }
    return result;
}

void each_index_is_there_once() {
    for (const std::uint64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 1000, 1024, 1025, 65537}) {
        std::vector<bool> seen(n);
        for (const std::uint64_t index : order(n, 7, 3)) {
            CHECK(index < n);
            CHECK(!seen[index]);
            seen[index] = true;
        }
    }
}

void huge_numbers_of_samples_work() {
    for (const std::uint64_t n : {std::uint64_t{1} << 40, (std::uint64_t{1} << 40) + 1, std::uint64_t{1} << 62}) {
        const Permutation permutation(n, 0, 0);
        std::set<std::uint64_t> seen;
        for (std::uint64_t i = 0; i < 10'000; ++i) {
            seen.insert(permutation(n - 1 - i));
        }
        CHECK(seen.size() == 10'000);
        CHECK(*seen.rbegin() < n);
    }
}

void each_seed_and_epoch_has_an_order_of_its_own() {
    std::set<std::vector<std::uint64_t>> seen;
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
        for (std::uint64_t epoch = 0; epoch < 30; ++epoch) {
            seen.insert(order(100, seed, epoch));
        }
    }
    CHECK(seen.size() == 900);
}

// Chi-squared of how often each index comes at each position, and after each other one, over many epochs.
struct Deviation {
    double positions = 0;
    double neighbours = 0;
};

template <typename MessageKind>
Deviation deviation(std::uint64_t n, std::uint64_t epochs, MessageKind order_of) {
    std::vector<double> at(n * n), after(n * n);
    for (std::uint64_t epoch = 0; epoch < epochs; ++epoch) {
        const std::vector<std::uint64_t> found = order_of(epoch);
        for (std::uint64_t i = 0; i < n; ++i) {
            at[i * n + found[i]] += 1;
            if (i > 0) {
                after[found[i - 1] * n + found[i]] += 1;
            }
        }
    }
    const double expected = static_cast<double>(epochs) / static_cast<double>(n);
    Deviation result;
    for (std::uint64_t i = 0; i < n * n; ++i) {
        result.positions += (at[i] - expected) * (at[i] - expected) / expected;
        result.neighbours += i / n == i % n ? 0 : (after[i] - expected) * (after[i] - expected) / expected;
    }
    return result;
}

void orders_are_as_uniform_as_those_of_a_shuffle() {
    for (const std::uint64_t n : {24, 32, 50}) {
        std::mt19937_64 random(n);
        std::vector<std::uint64_t> shuffled = order(n, 0, 0);
        const Deviation expected = deviation(n, 20'000, [&](std::uint64_t) {
            std::shuffle(shuffled.begin(), shuffled.end(), random);
            return shuffled;
        });
        const Deviation found = deviation(n, 20'000, [&](std::uint64_t epoch) { return order(n, 1, epoch); });
        CHECK(found.positions < 1.25 * expected.positions && found.positions > 0.8 * expected.positions);
        CHECK(found.neighbours < 1.25 * expected.neighbours && found.neighbours > 0.8 * expected.neighbours);
    }
}

}  // namespace

int main() {
    each_index_is_there_once();
    huge_numbers_of_samples_work();
    each_seed_and_epoch_has_an_order_of_its_own();
    orders_are_as_uniform_as_those_of_a_shuffle();
}
