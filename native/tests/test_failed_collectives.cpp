// Operations that fail are counted where they fail, whatever catches the error; others are not.
#include <cstdint>
#include <exception>
#include <stdexcept>

#include "check.hpp"
#include "failed_collectives.hpp"
#include "gloo_sockets.hpp"
#include "waiting.hpp"

using namespace elasticstate;

namespace {

std::uint64_t counted(const auto &action) {
    const std::uint64_t before = FailedCollectives::count();
    try {
        action();
    } catch (const std::exception &) {
    }
    return FailedCollectives::count() - before;
}

void an_operation_that_fails_counts() { CHECK(counted(gloo::fail) == 1); }

void an_error_that_a_connection_holds_counts_once() {
    const std::exception_ptr held = std::make_exception_ptr(gloo::IoException("connection closed"));
    CHECK(counted([&] { gloo::fail_with(held); }) == 1);
    CHECK(counted([&] { gloo::fail_with(held); }) == 0);
    const std::exception_ptr other = std::make_exception_ptr(gloo::IoException("connection closed"));
    CHECK(counted([&] { gloo::fail_with(other); }) == 1);
}

void other_errors_do_not_count() {
    CHECK(counted(gloo::refuse_arguments) == 0);
    CHECK(counted([] { gloo::fail_with(std::make_exception_ptr(std::runtime_error("own"))); }) == 0);
}

void only_failures_after_the_begin_of_a_generation_count_for_it() {
    const GlooSockets generation;
    CHECK(!generation.failed());
    counted(gloo::fail);
    CHECK(generation.failed());
    CHECK(!GlooSockets().failed());
}

}  // namespace

int main() {
    GlooSockets uncounted;
    counted(gloo::fail);
    CHECK(!FailedCollectives::is_installed() && !uncounted.failed());
    uncounted.sever();
    CHECK(uncounted.failed());
    CHECK(FailedCollectives::install() && FailedCollectives::install() && FailedCollectives::is_installed());
    an_operation_that_fails_counts();
    an_error_that_a_connection_holds_counts_once();
    other_errors_do_not_count();
    only_failures_after_the_begin_of_a_generation_count_for_it();
}
