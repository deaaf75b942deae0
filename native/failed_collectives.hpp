#pragma once

#include <cstdint>

namespace elasticstate {

/// Number of collectives of Gloo, point-to-point operations included, that have failed in this process.
///
/// A script can catch the error of a collective, and so can a library. Then nothing tells that the step was not
/// trained: a lost connection does not, because the collectives before the loss have succeeded. So errors are counted
/// where Gloo raises them: an operation that fails, because a peer is lost or late, throws gloo::IoException inside
/// libtorch_cpu.so, or throws one again that its connection holds. The entries for both functions in this library's
/// table of imported functions are replaced. Errors that precede an operation, such as those of wrong arguments, have
/// other types.
///
/// An exception that is thrown again later, by a wait for an operation that has failed, counts once.
class FailedCollectives {
public:
    /// Counts from now on. False: this build of torch does not permit it.
    static bool install() noexcept;
    static bool is_installed() noexcept;
    static std::uint64_t count() noexcept;
    /// Counts an operation that was ended in another way. Safe in a signal handler.
    static void add() noexcept;
};

}  // namespace elasticstate
