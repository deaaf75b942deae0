#include "sentinel.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "agent_messages.hpp"

namespace elasticstate {
namespace {

static_assert(std::endian::native == std::endian::little, "a MessageHead is read without conversion");
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

constexpr std::size_t MAX_MESSAGE = 128 * 1024;        // net/link.py: MAX_DATAGRAM_BYTES
constexpr std::chrono::seconds LEAVE_BOOT_WITHIN{1};  // then the process is killed, whatever Python does

timespec timespec_of(std::chrono::nanoseconds duration) noexcept {
    const auto nanoseconds = std::max<std::int64_t>(0, duration.count());
    return {static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
}

std::uint64_t nanoseconds_of(std::chrono::steady_clock::time_point time) noexcept {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(time.time_since_epoch()).count());
}

/// Waits while `word` is `seen`. False: the time is over, or a signal has arrived.
bool futex_wait(std::atomic<std::uint32_t> &word, std::uint32_t seen, std::chrono::nanoseconds timeout) noexcept {
    const timespec limit = timespec_of(timeout);
    return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &limit, nullptr, 0) == 0 || errno == EAGAIN;
}

/// Writes a line to the worker's log if that is possible at once: a full pipe must not stop the heartbeat.
void complain(const std::string &line) noexcept {
    pollfd log{STDERR_FILENO, POLLOUT, 0};
    if (poll(&log, 1, 100) == 1 && (log.revents & POLLOUT) != 0) {
        const std::string text = "elasticstate: " + line + "\n";
        [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    }
}

[[noreturn]] void fail(const char *what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

// ---------------------------------------------------------------------------------------------------- start and stop

Sentinel::Sentinel(ControlPage &page, int fd, void (*pause)())
    : page_(page), pause_(pause), socket_(fd), received_(new char[MAX_MESSAGE]) {
    wake_fd_ = Descriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!wake_fd_) {
        fail("cannot create an eventfd for the sentinel");
    }
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_NONBLOCK | O_CLOEXEC) != 0) {
        fail("cannot create a pipe for the sentinel");
    }
    signal_reader_ = Descriptor(ends[0]);
    signal_writer_ = Descriptor(ends[1]);
}

Sentinel::~Sentinel() {
    if (thread_) {
        stopping_ = true;
        wake();
        thread_->join();
    }
}

void Sentinel::start() {
    sigset_t others, before;
    sigfillset(&others);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
        sigdelset(&others, own);  // a fault of the thread itself is reported like any other
    }
    // The thread inherits the mask: signals are for the worker's own threads.
    pthread_sigmask(SIG_SETMASK, &others, &before);
    try {
        thread_ = std::make_unique<std::thread>(&Sentinel::serve, this);
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_->native_handle(), "es-sentinel");
}

void Sentinel::forked() noexcept {
    // The thread does not exist here, and may have held the mutex: neither is touched.
    forked_ = true;
    [[maybe_unused]] std::thread *const elsewhere = thread_.release();
    if (page_.keep_private()) {
        page_.word().hold();  // the next tick must check
    }
    socket_.close();
    wake_fd_.close();
    signal_reader_.close();
    signal_writer_.close();
}

void Sentinel::refuse_child() const {
    if (forked_) {
        throw std::runtime_error("this process was forked by a worker: only the worker itself may commit or end ticks");
    }
}

// ------------------------------------------------------------------------------------------------- the worker's side

bool Sentinel::in_generation() {
    refuse_child();
    const Lock lock(mutex_);
    return cut_ != nullptr;
}

std::string Sentinel::cause() {
    refuse_child();
    const Lock lock(mutex_);
    return cause_;
}

void Sentinel::send(std::string message) {
    refuse_child();
    const Lock lock(mutex_);
    send_locked(std::move(message));
}

void Sentinel::set_place(Place place) {
    refuse_child();
    const Lock lock(mutex_);
    page_.set_place(static_cast<std::uint64_t>(place));
}

void Sentinel::begin_training(double sync_s) {
    refuse_child();
    const Lock lock(mutex_);
    page_.begin_training(nanoseconds_of(Clock::now()));
    page_.set_place(static_cast<std::uint64_t>(Place::train));
    sync_s_ = sync_s;
}

void Sentinel::enter(std::uint64_t generation, std::shared_ptr<Severable> cut) {
    refuse_child();
    const Lock lock(mutex_);
    page_.enter(generation);
    pace_.begin(generation);
    held_ = false;
    end_tick_.reset();
    asked_ = false;
    cut_ = std::move(cut);
    if (ended_ >= generation) {
        page_.word().hold();
        wake();
    }
}

void Sentinel::left() {
    refuse_child();
    const Lock lock(mutex_);
    cut_.reset();
    changed();
}

bool Sentinel::end(std::uint64_t generation, std::string message) {
    refuse_child();
    const Lock lock(mutex_);
    const bool news = ended_ < generation;
    end_locked(generation, std::move(message));
    return news;
}

TickEnd Sentinel::end_of_tick(std::uint64_t ticks) {
    refuse_child();
    const Clock::time_point now = Clock::now();
    TickEnd end = TickEnd::go_on;
    Lock lock(mutex_);
    const std::uint64_t generation = page_.generation();
    look_at_lease_locked();
    if (ticks == 1) {
        const double train_s = static_cast<double>(nanoseconds_of(now) - page_.trains_since()) / 1e9;
        send_locked(agent_messages::first(generation, train_s, sync_s_));
    }
    wait_until(lock, [&] {
        if (ended_ >= generation) {
            end = TickEnd::ended;
        } else if (end_tick_ && ticks == *end_tick_) {
            end = TickEnd::interrupted;
        } else if (end_tick_ && ticks > *end_tick_) {
            end = TickEnd::beyond;
        } else {
            return end_tick_.has_value() || !held_;
        }
        return true;
    });
    pace_.resume();
    return end;
}

bool Sentinel::in_lease() {
    refuse_child();
    if (!page_.lease_is_over()) {
        return true;
    }
    const Lock lock(mutex_);
    look_at_lease_locked();
    return false;
}

bool Sentinel::wait_order(std::uint64_t generation) {
    refuse_child();
    Lock lock(mutex_);
    wait_until(lock, [&] { return ordered_end_ >= generation || leaving_ || world_generation_ > generation; });
    return ordered_end_ >= generation;
}

std::optional<std::string> Sentinel::wait_world(std::uint64_t joined) {
    refuse_child();
    Lock lock(mutex_);
    wait_until(lock, [&] { return leaving_ || (world_ && world_generation_ > joined); });
    return leaving_ ? std::nullopt : world_;
}

std::string Sentinel::wait_other() {
    refuse_child();
    Lock lock(mutex_);
    wait_until(lock, [&] { return !others_.empty(); });
    std::string message = std::move(others_.front());
    others_.pop_front();
    return message;
}

bool Sentinel::wait_verdict(std::uint64_t generation) {
    refuse_child();
    Lock lock(mutex_);
    wait_until(lock, [&] { return own_error_ >= generation || ended_ >= generation; });
    return own_error_ >= generation;
}

bool Sentinel::wait_gate(std::uint64_t generation) {
    refuse_child();
    Lock lock(mutex_);
    wait_until(lock, [&] { return open_gate_ >= generation || ended_ >= generation; });
    return open_gate_ >= generation;
}

bool Sentinel::wait_end(std::uint64_t generation) {
    Lock lock(mutex_);
    const auto left = [&] { return !cut_ || page_.generation() != generation; };
    wait_until(lock, [&] { return ended_ >= generation || left(); });
    return !left();
}

ReportReason Sentinel::wait_report(std::uint64_t generation) {
    Lock lock(mutex_);
    const auto left = [&] { return !cut_ || page_.generation() != generation; };
    wait_until(lock, [&] { return asked_ || ended_ >= generation || left(); });
    if (left()) {
        return ReportReason::left;
    }
    if (ended_ >= generation) {
        return ReportReason::ended;
    }
    asked_ = false;
    return ReportReason::asked;
}

/// A futex, because a wait on a condition variable does not return when a signal arrives.
template <class Condition>
void Sentinel::wait_until(Lock &lock, Condition condition) {
    while (!condition()) {
        const std::uint32_t seen = changes_;
        lock.unlock();
        if (!futex_wait(changes_, seen, PAUSE_INTERVAL)) {
            pause_();
        }
        lock.lock();
    }
}

void Sentinel::changed() noexcept {
    ++changes_;
    syscall(SYS_futex, &changes_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Sentinel::wake() noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_fd_.get(), &one, sizeof one);
}

// --------------------------------------------------------------------------------------------------- the own thread

void Sentinel::serve() {
    Clock::time_point next_beat = Clock::now();
    while (!stopping_) {
        const bool sweeping = sweep();
        const Clock::time_point now = Clock::now();
        if (now >= next_beat) {
            page_.beat();
            repeat_leave();
            next_beat = now + BEAT_INTERVAL;
        }
        poll_until(sweeping ? std::min(next_beat, now + SWEEP_INTERVAL) : next_beat);
    }
}

/// Cuts the generation that has ended and is not left yet. Returns true if there is one. A generation that only Python
/// can cut has a Python thread, which waits in `wait_end`.
bool Sentinel::sweep() {
    std::shared_ptr<Severable> cut;
    {
        const Lock lock(mutex_);
        const std::uint64_t generation = page_.generation();
        look_at_lease_locked();
        if (exit_at_ && Clock::now() >= *exit_at_ && place() == Place::boot) {
            _exit(0);
        }
        if (generation > 0 && generation <= ended_) {
            cut = cut_;
        }
    }
    if (cut) {
        cut->sever();
    }
    return cut != nullptr;
}

void Sentinel::poll_until(Clock::time_point deadline) {
    std::array<pollfd, 3> fds{{{-1, POLLIN, 0}, {wake_fd_.get(), POLLIN, 0}, {signal_reader_.get(), POLLIN, 0}}};
    {
        const Lock lock(mutex_);
        fds[0].fd = socket_.get();
        fds[0].events = static_cast<short>(outgoing_.empty() ? POLLIN : POLLIN | POLLOUT);
    }
    const timespec limit = timespec_of(deadline - Clock::now());
    if (ppoll(fds.data(), fds.size(), &limit, nullptr) <= 0) {
        return;
    }
    if ((fds[2].revents & POLLIN) != 0) {
        read_signals();
    }
    if ((fds[0].revents & POLLOUT) != 0) {
        flush();
    }
    if ((fds[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
        receive();
    }
    if ((fds[1].revents & POLLIN) != 0) {
        std::uint64_t count = 0;
        [[maybe_unused]] const ssize_t size = read(wake_fd_.get(), &count, sizeof count);
    }
}

void Sentinel::receive() {
    iovec place{received_.get(), MAX_MESSAGE};
    for (;;) {
        msghdr header{};
        header.msg_iov = &place;
        header.msg_iovlen = 1;
        const ssize_t size = recvmsg(socket_.get(), &header, MSG_DONTWAIT);
        if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
            return;
        }
        if (size <= 0) {
            link_lost();
            return;
        }
        if ((header.msg_flags & MSG_TRUNC) != 0) {
            complain("ignored a message from the agent: it is longer than " + std::to_string(MAX_MESSAGE) + " bytes");
        } else {
            obey({received_.get(), static_cast<std::size_t>(size)});
        }
    }
}

void Sentinel::obey(std::string_view message) {
    MessageHead head{};
    if (message.size() < sizeof head) {
        complain("ignored a message from the agent: it has no head, only " + std::to_string(message.size()) + " bytes");
        return;
    }
    std::memcpy(&head, message.data(), sizeof head);
    if (head.kind > MessageKind::ask_where) {
        complain("ignored a message from the agent: unknown kind " +
                 std::to_string(static_cast<std::uint64_t>(head.kind)));
        return;
    }
    const Lock lock(mutex_);
    obey_locked(head, message);
    changed();
}

/// A message about a generation that is over here, or has not begun yet, has no effect. Only END is remembered.
void Sentinel::obey_locked(const MessageHead &head, std::string_view message) {
    const bool present = head.generation == page_.generation();
    switch (head.kind) {
        case MessageKind::other:
            others_.emplace_back(message);
            break;
        case MessageKind::world:
            world_ = message;
            world_generation_ = head.generation;
            break;
        case MessageKind::hold:
            if (present) {
                answer_hold(head.generation, head.tick);
            }
            break;
        case MessageKind::release:
            if (present) {
                held_ = false;
                if (!end_tick_ && ended_ < head.generation) {
                    page_.word().clear();
                }
            }
            break;
        case MessageKind::end_now:
            if (head.generation == ended_ && ordered_end_ < ended_) {
                cause_ = message;
            }
            ordered_end_ = std::max(ordered_end_, head.generation);
            end_locked(head.generation, std::string(message));
            break;
        case MessageKind::end_at:
            if (present) {
                cause_ = message;
                end_tick_ = head.tick;
                page_.word().hold();
            }
            break;
        case MessageKind::confirm_own_error:
            own_error_ = std::max(own_error_, head.generation);
            break;
        case MessageKind::open_gate:
            open_gate_ = std::max(open_gate_, head.generation);
            break;
        case MessageKind::leave:
            leave_locked();
            break;
        case MessageKind::terminate:
            if (present && handles_stop_) {
                kill(getpid(), SIGTERM);
            } else {
                leave_locked();
            }
            break;
        case MessageKind::ask_where:
            asked_ = asked_ || present;
            break;
    }
}

void Sentinel::answer_hold(std::uint64_t generation, std::uint64_t number) {
    held_ = true;
    const std::uint64_t ticks = page_.word().hold() & ~HoldWord::HOLD;
    send_locked(agent_messages::hold_answer(generation, ticks, place() == Place::gate, number));
}

void Sentinel::end_locked(std::uint64_t generation, std::string message) {
    if (generation <= ended_) {
        return;
    }
    ended_ = generation;
    cause_ = std::move(message);
    page_.word().hold();  // the next tick must check
    changed();
    wake();
}

void Sentinel::look_at_lease_locked() {
    if (page_.lease_is_over() && page_.generation() > 0) {
        end_here_locked("lease expired (--lease)");
    }
}

/// Ends the present generation as an END of the agent would.
void Sentinel::end_here_locked(std::string_view cause) {
    const std::uint64_t generation = page_.generation();
    const MessageHead head{MessageKind::end_now, generation, 0};
    std::string message(reinterpret_cast<const char *>(&head), sizeof head);
    end_locked(generation, message + agent_messages::end(generation, cause));
}

void Sentinel::leave_locked() {
    leaving_ = true;
    switch (place()) {
        case Place::regroup:
            return;  // wait_world() reports it
        case Place::boot:
            exit_at_ = Clock::now() + LEAVE_BOOT_WITHIN;
            break;
        case Place::done:
            if ((notices_ >> SIGTERM & 1) != 0) {
                std::signal(SIGTERM, SIG_DFL);  // our handler waits for the end of the script
            }
            break;
        default:
            end_here_locked("LEAVE received");
    }
    kill(getpid(), signal_to_leave());  // reaches the main thread in a system call, too
}

int Sentinel::signal_to_leave() const noexcept {
    const std::uint32_t notices = notices_;
    const bool handled = notices != 0 && (notices >> SIGTERM & 1) == 0 && place() != Place::done;
    return handled ? std::countr_zero(notices) : SIGTERM;
}

/// The signal may have come between the main thread's last look for signals and a system call, which goes on then.
void Sentinel::repeat_leave() {
    if (!leaving_ || leave_heard_) {
        return;
    }
    const Lock lock(mutex_);
    if (place() == Place::regroup || place() == Place::done) {
        return;  // wait_world() reports it; the script ends in its own time
    }
    const int number = signal_to_leave();
    if ((notices_ >> number & 1) != 0) {  // a handler of the script is called once
        kill(getpid(), number);
    }
}

void Sentinel::read_signals() {
    std::array<unsigned char, 256> numbers{};
    const ssize_t size = read(signal_reader_.get(), numbers.data(), numbers.size());
    for (ssize_t i = 0; i < size; ++i) {
        if (numbers[i] < 32 && (notices_ >> numbers[i] & 1) != 0 && !leaving_ && place() != Place::done) {
            const Lock lock(mutex_);
            send_locked(agent_messages::notice(numbers[i]));
            return;
        }
    }
}

void Sentinel::send_locked(std::string message) {
    if (!outgoing_.empty() || !try_send(message)) {
        outgoing_.push_back(std::move(message));
        wake();  // to wait until the socket can take more
    }
}

void Sentinel::flush() {
    const Lock lock(mutex_);
    try {
        while (!outgoing_.empty() && try_send(outgoing_.front())) {
            outgoing_.pop_front();
        }
    } catch (const std::system_error &error) {
        complain(error.what());
        outgoing_.pop_front();
    }
}

/// True: the message is sent, or there is no agent any more. False: the agent must read first.
bool Sentinel::try_send(const std::string &message) {
    if (::send(socket_.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
        return true;
    }
    if (errno == EMSGSIZE) {
        fail("a message to the agent is too long");
    }
    return errno != EAGAIN && errno != EINTR && errno != ENOBUFS && errno != ENOMEM;
}

/// Handles the end of the agent, which ends the job. A worker does not outlive its agent, unless it is past the gate.
void Sentinel::link_lost() {
    const Lock lock(mutex_);
    if (place() != Place::done) {
        complain("lost the connection to the agent of this worker, so the worker exits");
        _exit(1);
    }
    socket_.close();
    outgoing_.clear();
}

}  // namespace elasticstate
