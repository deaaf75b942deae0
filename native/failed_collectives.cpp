#include "failed_collectives.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "import_table.hpp"

namespace elasticstate {
namespace {

constexpr std::string_view LIBRARY = "libtorch_cpu.so";
constexpr std::size_t REMEMBERED = 64;

using Throw = void (*)(void *, std::type_info *, void (*)(void *));  // __cxa_throw
using Rethrow = void (*)(std::exception_ptr);                        // std::rethrow_exception

// What the entries contained. A constant from before the first call of a replacement.
std::atomic<Throw> throw_new{nullptr};
std::atomic<Rethrow> throw_again{nullptr};

std::atomic<bool> installed{false};
std::atomic<std::uint64_t> failed{0};

std::mutex mutex;  // guards the two below
std::array<std::exception_ptr, REMEMBERED> *counted = nullptr;  // kept alive, so that no other one has its address
std::size_t next_place = 0;

bool is_failure(const std::type_info *type) noexcept {
    return type != nullptr && std::strcmp(type->name(), "N4gloo11IoExceptionE") == 0;
}

bool is_new(const std::exception_ptr &error) noexcept {
    const std::lock_guard lock(mutex);
    if (std::find(counted->begin(), counted->end(), error) != counted->end()) {
        return false;
    }
    (*counted)[next_place] = error;
    next_place = (next_place + 1) % REMEMBERED;
    return true;
}

[[noreturn]] void counting_throw(void *object, std::type_info *type, void (*destroy)(void *)) {
    if (is_failure(type)) {
        FailedCollectives::add();
    }
    throw_new.load()(object, type, destroy);
    std::terminate();
}

[[noreturn]] void counting_throw_again(std::exception_ptr error) {
    if (error && is_failure(error.__cxa_exception_type()) && is_new(error)) {
        FailedCollectives::add();
    }
    throw_again.load()(std::move(error));
    std::terminate();
}

bool replace_both() noexcept {
    const std::optional<ImportTable> table = ImportTable::of(LIBRARY);
    if (!table) {
        return false;
    }
    counted = new std::array<std::exception_ptr, REMEMBERED>;  // forever: threads may throw while the process ends
    return table->replace<Rethrow>("_ZSt17rethrow_exceptionNSt15__exception_ptr13exception_ptrE", throw_again,
                                   &counting_throw_again) &&
           table->replace<Throw>("__cxa_throw", throw_new, &counting_throw);
}

}  // namespace

bool FailedCollectives::install() noexcept {
    static std::once_flag once;
    std::call_once(once, [] { installed = replace_both(); });
    return installed;
}

bool FailedCollectives::is_installed() noexcept { return installed; }

std::uint64_t FailedCollectives::count() noexcept { return failed.load(); }

void FailedCollectives::add() noexcept { ++failed; }

}  // namespace elasticstate
