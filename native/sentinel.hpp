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
#include "proc_fds.hpp"

namespace elasticstate {

/// The kind in the head of a message to a worker; net/messages.py has the same numbers.
enum class Order : std::uint64_t { other, world, hold, release, end_now, end_at, own_error, gate_open, leave };

/// Before each message to a worker, little-endian; MessagePack follows.
struct OrderHead {
    Order kind;
    std::uint64_t generation;
    std::uint64_t tick;  // or the number of a hold
};
static_assert(sizeof(OrderHead) == 24);

/// Where a worker is; net/messages.py has the same numbers.
enum class Place : std::uint64_t { boot, regroup, train, gate, done };

/// How a tick ended for a worker that had to look up.
enum class TickEnd {
    go_on,
    ended,        // the generation is over
    interrupted,  // this is the tick that all leave at
    beyond,       // it lies behind
};

/// Speaks with the agent for its worker, on one thread that never needs the GIL.
///
/// It beats *alive* in the control page, answers HOLD, applies END, RELEASE and the verdicts, and cuts an ended
/// generation until the worker has left it. Everything it knows is *level*, not edge: `ended >= g` is sticky, so an END
/// that comes before there is anything to cut still works. What a message says to Python (a world, an answer, a cause)
/// is kept as bytes until Python asks.
///
/// The tick, and the hold, in one 64-bit word (hold_word.hpp):
///
///     worker: end of a tick   old = fetch_add(1)     old has HOLD?  wait, or leave when this is tick K
///     sentinel: HOLD          old = fetch_or(HOLD)   answer: old's ticks; the worker waits at the end of the next one
///
/// Both act on the *returned* value, and the wait comes after the save. So whoever answered `t` waits at the end of
/// tick `t + 1` at the latest, nobody passes K = 1 + max t before knowing K, and all leave at the same tick.
///
/// The `wait_...` functions and `end_of_tick` block, for any thread; `pause` is called at least every 0.1 s meanwhile,
/// and whenever a signal has come in, and may throw to give up. All else returns at once.
class Sentinel {
public:
    static constexpr std::chrono::milliseconds BEAT_INTERVAL{250};
    static constexpr std::chrono::milliseconds SWEEP_INTERVAL{3};
    static constexpr std::chrono::milliseconds PAUSE_INTERVAL{100};

    /// Takes over `fd`, a connected socket of SOCK_SEQPACKET. `page` must live as long. Throws std::system_error.
    Sentinel(ControlPage &page, int fd, void (*pause)());
    /// Stops the thread; it needs at most 0.1 s.
    ~Sentinel();
    Sentinel(const Sentinel &) = delete;
    Sentinel &operator=(const Sentinel &) = delete;

    /// The thread begins. Once.
    void start();
    /// To be called in a process that this one has forked: nothing that happens there reaches agent or page.
    void forked() noexcept;
    /// Where the numbers of arriving signals are to be written, a byte each; never blocks.
    int signal_fd() const noexcept { return signal_writer_.get(); }
    /// A signal of this number (one of the first 31) is a notice: the agent is told. Told to leave, the worker sends
    /// such a signal to itself, whose handler has to end it.
    void notice(int number) noexcept { notices_ |= 1U << number; }

    std::uint64_t generation() const noexcept { return page_.generation(); }
    std::uint64_t ticks() const noexcept { return page_.word().load() & ~HoldWord::HOLD; }
    Place place() const noexcept { return static_cast<Place>(page_.place()); }
    bool leaving() const noexcept { return leaving_.load(); }
    bool ended(std::uint64_t generation) const noexcept { return ended_.load() >= generation; }
    bool in_generation();
    /// The END message of the generation that ended last.
    std::string cause();
    /// Since the tick at which this worker was interrupted ended, in seconds; 0: it was not.
    double paused_s();

    /// Sends a message, or keeps it until the agent reads. An agent that is gone is seen by the thread.
    /// Throws std::system_error if the message is longer than the socket takes.
    void send(std::string message);
    void set_place(Place place);
    /// A generation begins: ticks count from 0, and `cut` is severed when it ends.
    void enter(std::uint64_t generation, std::shared_ptr<Severable> cut);
    /// Nothing of the generation is left in this process: the sweeping ends.
    void left();
    /// The generation is over, for the cause that `message` (an END) names. False: that was known.
    bool end(std::uint64_t generation, std::string message);

    /// Ends a tick: its number, from 1, if the worker has to look up: call `end_of_tick` with it. 0: go on.
    std::uint64_t count_tick() noexcept {
        const std::uint64_t old = page_.word().add_tick();
        const bool looks_up = old == 0 || (old & HoldWord::HOLD) != 0 || page_.lease_is_over();
        return looks_up ? (old & ~HoldWord::HOLD) + 1 : 0;
    }
    TickEnd end_of_tick(std::uint64_t ticks);
    /// Whether ticks may be made. If not, the present generation ends: another world may have been made.
    bool in_lease();

    /// The message of a world newer than generation `joined`; none when told to leave.
    std::optional<std::string> wait_world(std::uint64_t joined);
    /// The next message that only Python understands, oldest first.
    std::string wait_other();
    /// The verdict: true if the suspect's exception is its own, false if the generation is over.
    bool wait_verdict(std::uint64_t generation);
    /// True when the generation has ended and is not left yet, false when it is left: for a thread that cuts it.
    bool wait_end(std::uint64_t generation);
    /// True when the gate opens, false if the generation ends before that.
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
    void obey_locked(const OrderHead &head, std::string_view message);
    void answer_hold(std::uint64_t generation, std::uint64_t number);
    void end_locked(std::uint64_t generation, std::string message);
    void look_at_lease_locked();
    void end_here_locked(std::string_view cause);
    void leave_locked();
    int signal_to_leave() const noexcept;
    void send_locked(std::string message);
    bool try_send(const std::string &message);
    void link_lost();

    ControlPage &page_;
    void (*const pause_)();
    Descriptor socket_;
    Descriptor wake_fd_;
    Descriptor signal_reader_;
    Descriptor signal_writer_;
    std::unique_ptr<std::thread> thread_;
    std::unique_ptr<char[]> received_;  // of the thread alone
    std::atomic<bool> stopping_{false};
    std::atomic<bool> forked_{false};
    std::atomic<std::uint32_t> notices_{0};  // bit n: signal number n is a notice

    std::atomic<std::uint32_t> changes_{0};  // a futex: those who wait, wait for it to change
    std::atomic<std::uint64_t> ended_{0};    // the highest generation that has ended now
    std::atomic<bool> leaving_{false};

    std::mutex mutex_;                 // guards all below, place, and the beginning of a generation
    std::shared_ptr<Severable> cut_;   // of the generation that is not left yet
    std::deque<std::string> outgoing_;  // what the agent had no room for
    std::optional<std::string> world_;  // the newest one heard of
    std::uint64_t world_generation_ = 0;
    std::deque<std::string> others_;
    std::string cause_;
    bool held_ = false;
    std::optional<std::uint64_t> end_tick_;             // END at this tick of the present generation
    std::optional<Clock::time_point> paused_at_;        // when the tick at which the worker was interrupted ended
    std::uint64_t own_error_ = 0;                       // the generation for which the verdict was OWN
    std::uint64_t open_gate_ = 0;                       // the newest generation whose gate is open
    std::optional<Clock::time_point> exit_at_;          // told to leave in the middle of boot
};

}  // namespace elasticstate
