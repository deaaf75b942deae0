#include "bind_sentinel.hpp"

#include <nanobind/stl/string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "failed_collectives.hpp"
#include "gloo_sockets.hpp"
#include "numeric_hosts.hpp"
#include "sentinel.hpp"
#include "wait_clock.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace elasticstate {
namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

/// The object that Python holds. The sentinel shares the sockets themselves: its thread must not touch a reference of
/// Python's.
struct SharedSockets {
    std::shared_ptr<GlooSockets> sockets = std::make_shared<GlooSockets>();
};

/// Runs Python's signal handlers. Called without the GIL, between two slices of a wait. They run on the main thread.
/// Another thread must not request the GIL here: if the interpreter is ending, the request would never return.
void check_signals() {
    if (syscall(SYS_gettid) != getpid()) {  // glibc before 2.30 has no gettid()
        return;
    }
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
        throw nb::python_error();
    }
}

nb::bytes bytes_of(const std::string &message) { return nb::bytes(message.data(), message.size()); }
std::string string_of(const nb::bytes &message) { return {message.c_str(), message.size()}; }

nb::object tick(Sentinel &sentinel) {
    const std::uint64_t ticks = sentinel.count_tick();
    if (ticks == 0) [[likely]] {
        return nb::none();
    }
    TickEnd end{};
    {
        const nb::gil_scoped_release nogil;
        end = sentinel.end_of_tick(ticks);
    }
    return end == TickEnd::go_on ? nb::none() : nb::cast(end);
}

nb::object wait_world(Sentinel &sentinel, std::uint64_t joined) {
    std::optional<std::string> message;
    {
        const nb::gil_scoped_release nogil;
        message = sentinel.wait_world(joined);
    }
    return message ? bytes_of(*message) : nb::object(nb::none());
}

nb::bytes wait_other(Sentinel &sentinel) {
    std::string message;
    {
        const nb::gil_scoped_release nogil;
        message = sentinel.wait_other();
    }
    return bytes_of(message);
}

nb::dict message_kinds() {
    nb::dict numbers;
    const auto add = [&numbers](const char *name, MessageKind kind) { numbers[name] = static_cast<std::uint64_t>(kind); };
    add("OTHER", MessageKind::other);
    add("WORLD", MessageKind::world);
    add("HOLD", MessageKind::hold);
    add("RELEASE", MessageKind::release);
    add("END_NOW", MessageKind::end_now);
    add("END_AT", MessageKind::end_at);
    add("CONFIRM_OWN_ERROR", MessageKind::confirm_own_error);
    add("OPEN_GATE", MessageKind::open_gate);
    add("LEAVE", MessageKind::leave);
    add("TERMINATE", MessageKind::terminate);
    add("ASK_WHERE", MessageKind::ask_where);
    return numbers;
}

nb::dict places() {
    nb::dict numbers;
    const auto add = [&numbers](const char *name, Place place) { numbers[name] = static_cast<std::uint64_t>(place); };
    add("BOOT", Place::boot);
    add("REGROUP", Place::regroup);
    add("TRAIN", Place::train);
    add("GATE", Place::gate);
    add("DONE", Place::done);
    return numbers;
}

void bind_gloo_sockets(nb::module_ &m) {
    nb::class_<SharedSockets>(m, "GlooSockets")
        .def(nb::init<>())
        .def(
            "watch_store",
            [](SharedSockets &self, const std::string &host, std::uint16_t port) {
                self.sockets->watch_store(host, port);
            },
            "host"_a, "port"_a, NoGil())
        .def(
            "begin_group", [](SharedSockets &self, std::size_t size) { return self.sockets->begin_group(size); },
            "size"_a, NoGil())
        .def("end_group", [](SharedSockets &self) { self.sockets->end_group(); }, NoGil())
        .def("forget", [](SharedSockets &self) { self.sockets->forget(); }, NoGil())
        .def("sever", [](SharedSockets &self) { self.sockets->sever(); }, NoGil())
        .def_static("busy", [] { return GlooWaits::busy(); }, NoGil())
        .def("broken", [](SharedSockets &self) { return self.sockets->broken(); }, NoGil())
        .def("failed", [](SharedSockets &self) { return self.sockets->failed(); })
        .def("failures", [](SharedSockets &self) { return self.sockets->failures(); })
        .def("lost", [](SharedSockets &self) { return self.sockets->lost(); }, NoGil());
}

}  // namespace

void bind_sentinel(nb::module_ &m) {
    m.def("measure_waits", &WaitClock::install, NoGil());
    m.def("waited_ns", &WaitClock::waited_ns);
    m.def("count_failed_collectives", &FailedCollectives::install, NoGil());
    m.def("show_numeric_hosts", &show_numeric_hosts, NoGil());
    bind_gloo_sockets(m);
    nb::enum_<TickEnd>(m, "TickEnd")
        .value("ENDED", TickEnd::ended)
        .value("INTERRUPTED", TickEnd::interrupted)
        .value("BEYOND", TickEnd::beyond);
    nb::enum_<ReportReason>(m, "ReportReason")
        .value("LEFT", ReportReason::left)
        .value("ENDED", ReportReason::ended)
        .value("ASKED", ReportReason::asked);

    nb::class_<Sentinel> sentinel(m, "Sentinel");
    sentinel
        .def(
            "__init__",
            [](Sentinel *self, ControlPage &page, int fd) { new (self) Sentinel(page, fd, &check_signals); }, "page"_a,
            "fd"_a, nb::keep_alive<1, 2>())
        .def("start", &Sentinel::start)
        .def("forked", &Sentinel::forked)
        .def_prop_ro("signal_fd", &Sentinel::signal_fd)
        .def("notice", &Sentinel::notice, "number"_a)
        .def("forget", &Sentinel::forget, "number"_a)
        .def("handles_stop", &Sentinel::handles_stop, "handles"_a)
        .def_prop_ro("generation", &Sentinel::generation)
        .def_prop_ro("ticks", &Sentinel::ticks)
        .def_prop_ro("place", [](const Sentinel &self) { return static_cast<std::uint64_t>(self.place()); })
        .def_prop_ro("leaving", &Sentinel::leaving)
        .def("leave_heard", &Sentinel::leave_heard)
        .def_prop_ro("in_generation", &Sentinel::in_generation)
        .def_prop_ro("since_tick_s", &Sentinel::since_tick_s)
        .def_prop_ro("cause", [](Sentinel &self) { return bytes_of(self.cause()); })
        .def("ended", &Sentinel::ended, "generation"_a)
        .def("in_lease", &Sentinel::in_lease)
        .def("send", [](Sentinel &self, const nb::bytes &message) { self.send(string_of(message)); }, "message"_a)
        .def(
            "set_place", [](Sentinel &self, std::uint64_t place) { self.set_place(static_cast<Place>(place)); },
            "place"_a)
        .def("begin_training", &Sentinel::begin_training, "sync_s"_a)
        .def(
            "enter",
            [](Sentinel &self, std::uint64_t generation, const SharedSockets &shared) {
                self.enter(generation, shared.sockets);
            },
            "generation"_a, "sockets"_a)
        .def("left", &Sentinel::left)
        .def(
            "end",
            [](Sentinel &self, std::uint64_t generation, const nb::bytes &message) {
                return self.end(generation, string_of(message));
            },
            "generation"_a, "message"_a)
        .def("tick", &tick)
        .def("wait_world", &wait_world, "joined"_a)
        .def("wait_other", &wait_other)
        .def("wait_verdict", &Sentinel::wait_verdict, "generation"_a, NoGil())
        .def("wait_end", &Sentinel::wait_end, "generation"_a, NoGil())
        .def("wait_order", &Sentinel::wait_order, "generation"_a, NoGil())
        .def("wait_report", &Sentinel::wait_report, "generation"_a, NoGil())
        .def("wait_gate", &Sentinel::wait_gate, "generation"_a, NoGil());
    sentinel.attr("MESSAGE_KINDS") = message_kinds();
    sentinel.attr("PLACES") = places();
}

}  // namespace elasticstate
