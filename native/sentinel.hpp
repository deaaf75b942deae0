#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "control_page.hpp"
#include "gloo_sockets.hpp"
#include "pace.hpp"
#include "proc_fds.hpp"

namespace elasticstate {

/// Kind in the head of a message to a worker; MessageKind in net/messages.py has the same numbers.
enum class MessageKind : std::uint64_t {
    other, world, hold, release, end_now, end_at, confirm_own_error, open_gate, leave, terminate, ask_where
};

/// Head before each message to a worker, little-endian; MessagePack follows. See net/messages.py.
struct MessageHead {
    MessageKind kind;
    std::uint64_t generation;
    std::uint64_t tick;  // for HOLD: the number of the hold
};
static_assert(sizeof(MessageHead) == 24);

/// Place of a worker; Place in net/messages.py has the same numbers.
enum class Place : std::uint64_t { boot, regroup, train, gate, done };

/// Result of a tick at which the worker had to check for a hold or an end.
enum class TickEnd {
    go_on,
    ended,        // the generation is over
    interrupted,  // this is tick K, at which all leave
    beyond,       // tick K has passed
};

/// Reason for which a thread that reports on a generation wakes up.
enum class ReportReason {
    left,   // the generation is left
    ended,  // it has ended, and is not left yet
    asked,  // the agent asks where the main thread is
};

/// The worker's connection to its agent, on one thread that never needs the GIL.
///
/// The thread stamps *heartbeat* in the control page, answers HOLD, applies END, RELEASE and the verdicts, and cuts an
/// ended generation until the worker has left it. Its state is *level*, not edge: `ended >= g` is sticky, so an END
/// that arrives before there is anything to cut still works. The content of a message for Python (a world, an answer,
/// a cause) is kept as bytes until Python asks for it.
///
/// The tick, and the hold, in one 64-bit word (control_page.hpp):
///
///     worker: end of a tick   old = fetch_add(1)     old has HOLD?  wait, or leave when this is tick K
///     sentinel: HOLD          old = fetch_or(HOLD)   answer: old's ticks; the worker waits at the end of the next one
///
/// Both act on the *returned* value, and the wait comes after the save. So a worker that answered `t` waits at the
/// end of tick `t + 1` at the latest, no worker passes K = 1 + max t before it has received K, and all leave at the
/// same tick.
///
/// The `wait_...` functions and `end_of_tick` block, for any thread; `pause` is called at least every 0.1 s meanwhile,
/// and whenever a signal has come in, and may throw to give up. All other functions return at once.
class Sentinel {
public:
    static constexpr std::chrono::milliseconds BEAT_INTERVAL{250};
    static constexpr std::chrono::milliseconds SWEEP_INTERVAL{3};
    static constexpr std::chrono::milliseconds PAUSE_INTERVAL{100};

    /// Takes over `fd`, a connected socket of SOCK_SEQPACKET. `page` must live as long. Throws std::system_error.
    Sentinel(ControlPage &page, int fd, void (*pause)());
    /// Stops the thread, within 0.1 s.
    ~Sentinel();
    Sentinel(const Sentinel &) = delete;
    Sentinel &operator=(const Sentinel &) = delete;

    /// Starts the thread. Call this once.
    void start();
    /// Call this in a forked child: from then on, the child affects neither agent nor page.
    void forked() noexcept;
    /// Descriptor to which the numbers of arriving signals are written, one byte each; never blocks.
    int signal_fd() const noexcept { return signal_writer_.get(); }
    /// Makes a signal (one of the first 31) a preemption notice, which is sent to the agent. When the worker receives
    /// LEAVE, it sends such a signal to itself, again and again until the signal's handler calls `leave_heard`.
    void notice(int number) noexcept { notices_ |= 1U << number; }
    /// Makes a signal no preemption notice any more, because the script handles it.
    void forget(int number) noexcept { notices_ &= ~(1U << number); }
    /// Says whether the script handles SIGTERM: then TERMINATE is this signal, and leaves the world as it is.
    void handles_stop(bool handles) noexcept { handles_stop_ = handles; }

    std::uint64_t generation() const noexcept { return page_.generation(); }
    std::uint64_t ticks() const noexcept { return page_.word().load() & ~HoldWord::HOLD; }
    Place place() const noexcept { return static_cast<Place>(page_.place()); }
    bool leaving() const noexcept { return leaving_.load(); }
    /// Says that the main thread ends the process because of LEAVE.
    void leave_heard() noexcept { leave_heard_ = true; }
    bool ended(std::uint64_t generation) const noexcept { return ended_.load() >= generation; }
    bool in_generation();
    /// The END message of the generation that ended last: that of the agent, as soon as it is there.
    std::string cause();

    /// Sends a message, or keeps it until the agent reads. The thread detects the end of the agent.
    /// Throws std::system_error if the message is longer than the socket takes.
    void send(std::string message);
    void set_place(Place place);
    /// Begins to train, `sync_s` seconds after the process groups of the generation existed.
    void begin_training(double sync_s);
    /// Begins a generation: ticks count from 0, and `cut` is severed when the generation ends.
    void enter(std::uint64_t generation, std::shared_ptr<Severable> cut);
    /// Ends the severing: nothing of the generation is left in this process.
    void left();
    /// Ends the generation for the cause in `message` (an END). False: the generation had ended before.
    bool end(std::uint64_t generation, std::string message);

    /// Ends a tick. Returns its number, from 1, if the worker must call `end_of_tick` with it; 0: continue.
    std::uint64_t count_tick() noexcept {
        const std::uint64_t old = page_.word().add_tick();
        pace_.tick((old & ~HoldWord::HOLD) + 1);
        const bool looks_up = old == 0 || (old & HoldWord::HOLD) != 0 || page_.lease_is_over();
        return looks_up ? (old & ~HoldWord::HOLD) + 1 : 0;
    }
    TickEnd end_of_tick(std::uint64_t ticks);
    /// The time since the last tick, in seconds. For the thread that trains.
    double since_tick_s() const noexcept { return pace_.since_tick_s(); }
    /// True if ticks are allowed. If not, the present generation ends, because another world may exist.
    bool in_lease();

    /// Waits for the agent's END of a generation that has ended here before it arrived: true when it is there, and
    /// `cause` returns it; false if it does not come, as a newer world or LEAVE does. Call it after READY.
    bool wait_order(std::uint64_t generation);
    /// Returns the message of a world newer than generation `joined`; none after LEAVE.
    std::optional<std::string> wait_world(std::uint64_t joined);
    /// Returns the next message that only Python can decode, oldest first.
    std::string wait_other();
    /// Waits for the verdict: true if the suspect's exception is its own, false if the generation is over.
    bool wait_verdict(std::uint64_t generation);
    /// For a thread that cuts the generation: true when it has ended and is not left yet, false when it is left.
    bool wait_end(std::uint64_t generation);
    /// Waits until there is something to report about the generation. Call it from one thread.
    ReportReason wait_report(std::uint64_t generation);
    /// Waits for the gate: true when it opens, false if the generation ends before that.
    bool wait_gate(std::uint64_t generation);

private:
    using Clock = std::chrono::steady_clock;
    using Lock = std::unique_lock<std::mutex>;

    void refuse_child() const;
    template <class Condition>
    void wait_until(Lock &lock, Condition condition);
    void changed() noexcept;
    void wake() noexcept;

    void serve();
    bool sweep();
    void poll_until(Clock::time_point deadline);
    void receive();
    void flush();
    void read_signals();
    void obey(std::string_view message);
    void obey_locked(const MessageHead &head, std::string_view message);
    void answer_hold(std::uint64_t generation, std::uint64_t number);
    void end_locked(std::uint64_t generation, std::string message);
    void look_at_lease_locked();
    void end_here_locked(std::string_view cause);
    void leave_locked();
    int signal_to_leave() const noexcept;
    void repeat_leave();
    void send_locked(std::string message);
    bool try_send(const std::string &message);
    void link_lost();

    ControlPage &page_;
    Pace pace_{page_};  // used by the thread that trains
    void (*const pause_)();
    Descriptor socket_;
    Descriptor wake_fd_;
    Descriptor signal_reader_;
    Descriptor signal_writer_;
    std::unique_ptr<std::thread> thread_;
    std::unique_ptr<char[]> received_;  // used by the thread only
    std::atomic<bool> stopping_{false};
    std::atomic<bool> forked_{false};
    std::atomic<std::uint32_t> notices_{0};  // bit n: signal number n is a preemption notice

    std::atomic<std::uint32_t> changes_{0};  // a futex: waiting threads wait for a change
    std::atomic<std::uint64_t> ended_{0};    // the highest generation that has ended
    std::atomic<bool> leaving_{false};  // LEAVE has arrived
    std::atomic<bool> leave_heard_{false};
    std::atomic<bool> handles_stop_{false};

    std::mutex mutex_;                 // guards all below, `place`, and the begin of a generation
    std::shared_ptr<Severable> cut_;   // of the generation that is not left yet
    std::deque<std::string> outgoing_;  // messages that the socket could not take yet
    std::optional<std::string> world_;  // message of the newest world
    std::uint64_t world_generation_ = 0;
    std::deque<std::string> others_;
    std::string cause_;
    std::uint64_t ordered_end_ = 0;  // the highest generation of which the agent's END has arrived
    bool held_ = false;
    std::optional<std::uint64_t> end_tick_;             // END at this tick of the present generation
    double sync_s_ = 0.0;                               // from the existence of its process groups to its training
    std::uint64_t own_error_ = 0;                       // the generation with the verdict: own error
    std::uint64_t open_gate_ = 0;                       // the newest generation whose gate is open
    bool asked_ = false;                                // ASK_WHERE about the present generation
    std::optional<Clock::time_point> exit_at_;          // after LEAVE during boot
};

}  // namespace elasticstate
