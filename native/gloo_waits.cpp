#include "gloo_waits.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/ucontext.h>
#include <unistd.h>
#include <unwind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "failed_collectives.hpp"
#include "proc_fds.hpp"

// Part of glibc's interface to compilers since 2.0: a thread's list of handlers for its cancellation.
extern "C" {
[[gnu::weak]] void _pthread_cleanup_push(_pthread_cleanup_buffer *, void (*)(void *), void *) noexcept;
[[gnu::weak]] void _pthread_cleanup_pop(_pthread_cleanup_buffer *, int) noexcept;
}

namespace elasticstate {
namespace {

constexpr std::uint64_t WAIT_FRAMES = 1024;  // bytes of stack between the system call and the waiting function
constexpr std::chrono::milliseconds LOOK_INTERVAL{20};
constexpr std::chrono::milliseconds ASLEEP_FOR{60};  // a wait that is woken ends sooner
constexpr std::chrono::seconds HOPELESS_AFTER{5};
constexpr int FRAMES = 8;  // from the handler to the waiting function, and some more
constexpr char THREAD_NAME[] = "pt_gloo_runloop";

std::atomic<std::uint64_t> expected_address{0};  // address of the futex whose wait must be interrupted
std::atomic<pid_t> expected_thread{0};  // 0 after it has left its wait, or if it waits for the GIL
std::atomic<void *> python{nullptr};    // where the interpreter is loaded

/// net/messages.py has the signal for stacks: SIGRTMIN + 9.
int wake_signal() noexcept { return SIGRTMIN + 10; }

/// True if the signal has interrupted a futex wait: the system call has returned -EINTR, and its instruction is past.
bool interrupted_futex([[maybe_unused]] const ucontext_t &context, [[maybe_unused]] std::uint64_t address) noexcept {
#if defined(__x86_64__)
    const auto &registers = context.uc_mcontext.gregs;
    const auto *const next = reinterpret_cast<const std::uint8_t *>(registers[REG_RIP]);
    const bool behind_syscall = next[-2] == 0x0f && next[-1] == 0x05;
    return behind_syscall && registers[REG_RAX] == -EINTR && registers[REG_R10] != 0 &&
           static_cast<std::uint64_t>(registers[REG_RDI]) == address;
#elif defined(__aarch64__)
    const auto &registers = context.uc_mcontext;
    const auto *const next = reinterpret_cast<const std::uint32_t *>(registers.pc);
    const bool behind_syscall = next[-1] == 0xd4000001;  // the address is overwritten by the result
    return behind_syscall && address != 0 && static_cast<std::int64_t>(registers.regs[0]) == -EINTR &&
           registers.regs[8] == SYS_futex && registers.regs[3] != 0;
#else
    return false;
#endif
}

std::uint64_t stack_pointer(const ucontext_t &context) noexcept {
#if defined(__x86_64__)
    return static_cast<std::uint64_t>(context.uc_mcontext.gregs[REG_RSP]);
#elif defined(__aarch64__)
    return context.uc_mcontext.sp;
#else
    return 0 * sizeof context;
#endif
}

/// Returns the newest entry of this thread's list of handlers; nullptr: no entry, or no such list.
_pthread_cleanup_buffer *newest_cleanup() noexcept {
    if (_pthread_cleanup_push == nullptr || _pthread_cleanup_pop == nullptr) {
        return nullptr;
    }
    _pthread_cleanup_buffer mine{};
    _pthread_cleanup_push(&mine, [](void *) {}, nullptr);
    _pthread_cleanup_pop(&mine, 0);
    return mine.__prev;
}

/// Ends a wait on a condition variable as a cancellation would: the thread is no waiter any more, and has the mutex.
bool leave_condition(std::uint64_t stack) noexcept {
    _pthread_cleanup_buffer *const cleanup = newest_cleanup();
    const auto at = reinterpret_cast<std::uint64_t>(cleanup);
    if (at < stack || at > stack + WAIT_FRAMES) {
        return false;  // the entry belongs to other code: the interrupted call is no such wait
    }
    _pthread_cleanup_pop(cleanup, 1);
    int before = 0;
    pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, &before);  // the wait had made cancellation asynchronous
    return true;
}

struct Search {
    int frames = 0;
    bool found = false;
};

_Unwind_Reason_Code look_for_python(_Unwind_Context *frame, void *given) {
    auto &search = *static_cast<Search *>(given);
    Dl_info where{};
    search.found = dladdr(reinterpret_cast<void *>(_Unwind_GetIP(frame)), &where) != 0 && where.dli_fbase == python;
    return search.found || ++search.frames == FRAMES ? _URC_END_OF_STACK : _URC_NO_REASON;
}

/// True if the interpreter waits here, for the GIL.
bool waits_in_python() noexcept {
    Search search;
    if (python != nullptr) {
        _Unwind_Backtrace(look_for_python, &search);
    }
    return search.found;
}

void on_signal(int, siginfo_t *, void *given) {
    const auto thread = static_cast<pid_t>(syscall(SYS_gettid));
    const auto &context = *static_cast<ucontext_t *>(given);
    if (expected_thread != thread || !interrupted_futex(context, expected_address)) {
        return;
    }
    if (waits_in_python()) {
        expected_thread = 0;
        return;
    }
    if (!leave_condition(stack_pointer(context))) {
        return;
    }
    expected_thread = 0;
    FailedCollectives::add();
    throw std::runtime_error("Connection closed: the generation has ended during this operation");
}

/// Installs the handler. False: other code uses the signal.
bool install_handler() noexcept {
    static const bool installed = [] {
        struct sigaction before {};
        if (sigaction(wake_signal(), nullptr, &before) != 0 || before.sa_handler != SIG_DFL) {
            return false;
        }
        Dl_info where{};
        if (void *const symbol = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"); symbol && dladdr(symbol, &where) != 0) {
            python = where.dli_fbase;
        }
        struct sigaction action {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;  // a handler that throws never returns
        sigemptyset(&action.sa_mask);
        return sigaction(wake_signal(), &action, nullptr) == 0;
    }();
    return installed;
}

std::size_t read_file(const char *path, char *buffer, std::size_t size) noexcept {
    const Descriptor file(open(path, O_RDONLY | O_CLOEXEC));
    const ssize_t length = file ? read(file.get(), buffer, size - 1) : -1;
    buffer[std::max<ssize_t>(0, length)] = '\0';
    return static_cast<std::size_t>(std::max<ssize_t>(0, length));
}

bool runs_collectives(pid_t thread) noexcept {
    std::array<char, 48> path{};
    std::array<char, 32> name{};
    std::snprintf(path.data(), path.size(), "/proc/self/task/%d/comm", thread);
    const std::size_t length = read_file(path.data(), name.data(), name.size());
    return length == sizeof THREAD_NAME && std::memcmp(name.data(), THREAD_NAME, sizeof THREAD_NAME - 1) == 0;
}

/// A futex wait. glibc waits for a locked mutex with FUTEX_WAIT and the value 2; on a condition variable before 2.33 with
/// FUTEX_WAIT and 0, since then with FUTEX_WAIT_BITSET.
struct FutexWait {
    std::uint64_t address;
    bool has_timeout;
    bool is_for_mutex;
};

std::optional<FutexWait> futex_wait_of(pid_t thread) noexcept {
    std::array<char, 48> path{};
    std::array<char, 256> call{};
    std::snprintf(path.data(), path.size(), "/proc/self/task/%d/syscall", thread);
    read_file(path.data(), call.data(), call.size());
    long number = 0;
    std::uint64_t address = 0, operation = 0, value = 0, timeout = 0;
    if (std::sscanf(call.data(), "%ld %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64, &number, &address, &operation,
                    &value, &timeout) != 5) {
        return std::nullopt;  // the thread runs
    }
    const std::uint64_t command = operation & static_cast<std::uint64_t>(FUTEX_CMD_MASK);
    const bool waits = number == SYS_futex && (command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET);
    return waits ? std::optional(FutexWait{address, timeout != 0, command == FUTEX_WAIT && value == 2}) : std::nullopt;
}

std::vector<pid_t> threads_of_collectives() {
    std::vector<pid_t> found;
    const std::unique_ptr<DIR, int (*)(DIR *)> directory(opendir("/proc/self/task"), &closedir);
    while (const dirent *const entry = directory ? readdir(directory.get()) : nullptr) {
        const auto thread = static_cast<pid_t>(std::strtol(entry->d_name, nullptr, 10));
        if (thread > 0 && runs_collectives(thread)) {
            found.push_back(thread);
        }
    }
    return found;
}

void interrupt(pid_t thread, std::uint64_t address) noexcept {
    expected_address = address;
    expected_thread = thread;
    if (install_handler()) {
        syscall(SYS_tgkill, getpid(), thread, wake_signal());
    }
}

[[noreturn]] void give_up() noexcept {
    constexpr char line[] =
        "elasticstate: an operation of the ended generation cannot be interrupted. This worker exits, and the next one "
        "in its slot resumes from the commit.\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line, sizeof line - 1);
    kill(getpid(), SIGKILL);
    _exit(1);
}

}  // namespace

bool GlooWaits::busy() {
    if (access("/proc/self/syscall", R_OK) != 0) {
        return false;  // this kernel does not show what a thread does
    }
    const std::vector<pid_t> threads = threads_of_collectives();
    return std::any_of(threads.begin(), threads.end(), [](pid_t thread) {
        const std::optional<FutexWait> asleep = futex_wait_of(thread);
        return !asleep || asleep->has_timeout || asleep->is_for_mutex;
    });
}

void GlooWaits::wake() {
    const Clock::time_point now = Clock::now();
    if (now < next_look_) {
        return;
    }
    next_look_ = now + LOOK_INTERVAL;
    std::vector<Wait> waits;
    for (const pid_t thread : threads_of_collectives()) {
        const std::optional<FutexWait> asleep = futex_wait_of(thread);
        if (!asleep || !asleep->has_timeout) {
            continue;
        }
        const std::uint64_t address = asleep->address;
        const auto known = std::find_if(waits_.begin(), waits_.end(), [&](const Wait &wait) {
            return wait.thread == thread && wait.address == address;
        });
        const bool same = known != waits_.end() && !(known->interrupted && expected_thread == 0);
        waits.push_back(same ? *known : Wait{thread, address, now, false});
    }
    waits_ = std::move(waits);
    for (Wait &wait : waits_) {
        if (now - wait.since > HOPELESS_AFTER) {
            give_up();
        }
        if (!wait.interrupted && now - wait.since > ASLEEP_FOR) {
            wait.interrupted = true;
            interrupt(wait.thread, wait.address);
            return;  // one at a time: the handler has one expected thread
        }
    }
}

}  // namespace elasticstate
