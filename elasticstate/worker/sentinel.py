"""Sentinel: the Python side of the worker's link to the agent. A C++ thread (``native/sentinel.hpp``) does the work.

That thread owns the socket to the agent and never needs the GIL. It sends heartbeats, answers HOLD, applies END,
RELEASE and verdicts, and cuts an ended generation. This module sends the messages that need Python, waits (without the
GIL, with working Ctrl-C and signal handlers), and turns messages that the thread received into exceptions.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn, TypeVar

from elasticstate import _native, tracebacks
from elasticstate.compat import libraries
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.errors import CollectiveError, HostsUpdatedInterrupt
from elasticstate.log import logger
from elasticstate.net import messages
from elasticstate.net.link import encode_from_worker
from elasticstate.net.messages import Place
from elasticstate.tracebacks import error_chain
from elasticstate.worker import script
from elasticstate.worker.script import exit_for_replacement

if TYPE_CHECKING:
    from elasticstate.worker.contexts import Context

A = TypeVar("A")


_SWEEP_INTERVAL_S = 0.003
_WATCH_INTERVAL_S = 1.0
_WARN_OF_GOING_ON_S = 5.0  # after the end of the generation
_LONGEST_STACK = 4000  # characters


class Sentinel:
    """Link of the worker to its agent, as long as the object is referenced. One per process. Call ``start()`` once.

    ``descriptor``: of the connected socket to the agent, which the sentinel owns from now on. ``reports``: in each
    generation, a thread reports where the main thread is, when the driver asks. Raises OSError if no descriptors are
    available.
    """

    def __init__(self, descriptor: int, worker: WorkerId, page: _native.ControlPage, reports: bool = False) -> None:
        self._reports = reports
        self._worker = worker
        self._page = page
        self._native = _native.Sentinel(page, descriptor)
        self._commit: CommitId | None = None
        self._previous: CommitId | None = None
        self._newest_sealed: CommitId | None = None  # intact or not
        self._preemption_signals: list[int] = []
        self._stop_handler: object = None  # the present handler of SIGTERM
        self._exits = False
        self._helpers: list[threading.Thread] = []  # of the present generation
        self._has_left = threading.Event()  # the present generation, so that nobody watches it any more
        self._formed_at = 0.0  # when the process groups of the present generation existed
        self._has_reported = threading.Event()  # the reporter of the present generation has nothing to report any more
        self._has_reported.set()
        self._entered_ns = 0  # when the present generation was entered
        self._own_end = ""  # the error with which this worker has ended the present generation; "": it has not
        self._has_reported_hang = False  # of the present generation
        self._tick_end: _native.TickEnd | None = None  # what the last tick of the present generation has raised
        self._refused_at: float | None = None  # when a commit or tick of the present generation first was refused
        self._has_warned = False  # that the script of the present generation goes on
        self._most_refusals_s = 0.0
        self.has_gone_on = False
        """True if the script has caught the interrupt of the present generation, and has gone on."""

    # --------------------------------------------------------------------------------------------------- start and stop

    def start(self, preemption_signals: Iterable[int] = (signal.SIGTERM,)) -> None:
        """Send HELLO and start the thread. Call it on the main thread, once.

        ``preemption_signals`` are preemption notices from now on, except those that the program handles or ignores.
        """
        self.send(messages.Hello(self._worker, os.getpid(), messages.PROTOCOL_VERSION))
        self._preemption_signals = [
            number for number in preemption_signals if signal.getsignal(number) is signal.SIG_DFL
        ]
        for number in self._preemption_signals:
            self._native.notice(number)
            signal.signal(number, self._on_preemption_signal)
        if self._preemption_signals:
            signal.set_wakeup_fd(self._native.signal_fd, warn_on_full_buffer=False)
        self._follow_handlers()
        self._native.start()
        self._ignore_signals_at_exit()
        _started.add(self)

    def finish(self) -> None:
        """Mark the worker as done: it has passed the exit gate, and ends in its own time as a plain process. A
        preemption signal has no effect any more, as the job is about to end in any case; LEAVE ends the worker."""
        self._native.set_place(Place.DONE)
        if self._own_handlers():
            signal.set_wakeup_fd(-1)
        self._ignore_signals_at_exit()

    def _ignore_signals_at_exit(self) -> None:
        """Ignore signals before the exit functions that were registered until now, as the end of the interpreter would
        give them their usual effect back."""
        atexit.register(_call_if_alive, weakref.WeakMethod(self._ignore_signals))

    def _ignore_signals(self) -> None:
        """Ignore SIGINT and the preemption signals that the script does not handle."""
        self._handle_own(signal.SIG_IGN)
        script.ignore_at_exit()

    def _handle_own(self, handler: signal.Handlers) -> None:
        """Set the handler of the preemption signals that the script does not handle."""
        if ours := self._own_handlers():
            signal.set_wakeup_fd(-1)
        for number in ours:
            signal.signal(number, handler)

    def _own_handlers(self) -> list[int]:
        """Return the preemption signals that the script does not handle."""
        return [n for n in self._preemption_signals if signal.getsignal(n) == self._on_preemption_signal]

    def _follow_handlers(self) -> None:
        """Leave to the script the signals for which it has installed a handler since the last call."""
        self._stop_handler = libraries.handler_of(signal.SIGTERM)
        for number in set(self._preemption_signals).difference(ours := self._own_handlers()):
            self._native.forget(number)
        self._preemption_signals = ours
        self._native.handles_stop(callable(self._stop_handler) and signal.SIGTERM not in ours)

    def _on_preemption_signal(self, signum: int, frame: object) -> None:
        if not self.is_leaving or self._exits or self._native.place == Place.DONE:
            return  # the thread has reported the signal; or a second signal arrives while the interpreter ends
        if self._native.place == Place.BOOT:
            self._exits = True
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self._leave()

    def _leave(self) -> NoReturn:
        """Raise SystemExit(0): the job wants this worker to leave. Further signals have no effect."""
        self._exits = True
        self._native.leave_heard()
        script.ignore()
        self._ignore_signals_at_exit()
        raise SystemExit(0)

    def _detach_forked(self) -> None:
        """Detach a forked child of the worker: it is not part of the job, and SIGTERM ends it."""
        self._native.forked()
        self._handle_own(signal.SIG_DFL)

    # ---------------------------------------------------------------------------------------------- state of the worker

    @property
    def generation(self) -> int:
        return self._native.generation

    @property
    def ticks(self) -> int:
        """Ticks completed in the present generation."""
        return self._native.ticks

    @property
    def cause(self) -> str:
        """Cause of the last generation's end; "" if none has ended."""
        end = self._last_end()
        return "" if end is None else end.cause

    def _last_end(self) -> messages.End | None:
        message = self._native.cause
        if not message:
            return None
        end = messages.decode_to_worker(message)
        assert isinstance(end, messages.End)
        return end

    @property
    def is_leaving(self) -> bool:
        return self._native.leaving

    def has_ended(self, generation: int) -> bool:
        """Return True if ``generation`` is over. It never becomes False again."""
        return self._native.ended(generation)

    @property
    def trains(self) -> bool:
        """True if the user's function runs: the groups of all members exist."""
        return self._native.place == Place.TRAIN

    @property
    def is_in_generation(self) -> bool:
        """True if a generation was entered and not left yet."""
        return self._native.in_generation

    def check(self) -> None:
        """Raise CollectiveError if the present generation is over. Call it before each step of a regroup."""
        if self.has_ended(self.generation):
            raise CollectiveError(self.cause)

    # --------------------------------------------------------------------------------------------------------- messages

    def send(self, message: messages.FromWorkerBody) -> None:
        """Send a message to the agent, now or as soon as the agent reads."""
        self._native.send(encode_from_worker(message))

    def request(self, request: messages.FromWorkerBody, answer: type[A]) -> A:
        """Send ``request``, and wait for the agent's message of type ``answer``. Other messages are dropped."""
        self.send(request)
        while True:
            message = messages.decode_to_worker(self._native.wait_other())
            if isinstance(message, answer):
                return message

    def record_commits(self, commit: CommitId | None, previous: CommitId | None) -> None:
        """Record the ids of both buffers. Report a generation's first commit at once: the job has now committed."""
        known, self._commit, self._previous = self._commit, commit, previous
        if commit is not None and (self._newest_sealed is None or commit > self._newest_sealed):
            self._newest_sealed = commit
        if commit is not None and commit.tick and (known is None or known < CommitId(commit.generation, 1)):
            self.send(messages.CommitSealed(commit))

    # ------------------------------------------------------------------------------------------------------ generations

    def ready(
        self,
        store: str,
        behind: bool = False,
        names: int = 0,
        has_shards: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> messages.World:
        """Send READY and wait for the next world. Raises SystemExit(0) on the LEAVE message.

        ``behind``: this worker ended ticks without training in the last generation. ``names`` and ``has_shards``: see
        messages.Ready. ``meanwhile`` is called between the two.
        """
        self._native.set_place(Place.REGROUP)
        joined = self.generation
        self.send(
            messages.Ready(
                generation=joined,
                commit=self._commit,
                previous=self._previous,
                store=store,
                ticks=self.ticks,
                paused_s=self._native.since_tick_s if self.ticks else 0.0,
                behind=behind,
                sealed=self._newest_sealed,
                names=names,
                commit_s=self._page.commit_s,
                has_shards=has_shards,
                trained_s=time.monotonic() - since / 1e9 if (since := self._page.trains_since) else 0.0,
            )
        )
        if self._reports and self._own_end and self._native.wait_order(joined):
            self._report_hang(joined)
        if meanwhile is not None:
            meanwhile()
        message = self._native.wait_world(joined)
        if message is None:
            self._leave()
        world = messages.decode_to_worker(message)
        assert isinstance(world, messages.World)
        return world

    def enter(self, world: messages.World, context: Context) -> None:
        """Begin a generation: ticks count from 0, and ``context`` is cut when it ends."""
        self._tick_end, self.has_gone_on = None, False
        self._refused_at, self._has_warned, self._most_refusals_s = None, False, world.options.regroup_timeout_s
        self._entered_ns, self._own_end, self._has_reported_hang = time.time_ns(), "", False
        self._native.enter(world.generation, context.sockets)
        self._has_left = threading.Event()
        if context.severs_in_python:
            for help_with in (self._cut, self._watch):
                helper = threading.Thread(target=help_with, args=(world.generation, context), daemon=True)
                helper.start()
                self._helpers.append(helper)
        if self._reports:
            self._has_reported = threading.Event()
            arguments = (world.generation, context.sockets, self._has_reported, self._has_left)
            libraries.start_thread(self._report, *arguments)

    def _report(
        self,
        generation: int,
        sockets: _native.GlooSockets,
        has_reported: threading.Event,
        has_left: threading.Event,
    ) -> None:
        """Report where the main thread is, which may be stuck: when the driver asks, and when the generation has ended
        because it hangs. Then watch whether the script leaves the generation."""
        try:
            while (reason := self._native.wait_report(generation)) is _native.ReportReason.ASKED:
                self._send_where(generation)
            if reason is _native.ReportReason.ENDED:
                self._report_hang(generation)
        finally:
            has_reported.set()
        if reason is _native.ReportReason.ENDED:
            self._replace_if_it_goes_on(sockets, has_left)

    def _replace_if_it_goes_on(self, sockets: _native.GlooSockets, has_left: threading.Event) -> None:
        """Replace this process if its script has caught the error of a collective, and has gone on for long after the
        end of the generation, without the end of a tick, where ``refuse`` does that."""
        began_at, has_warned = time.monotonic(), False
        while not has_left.wait(_WATCH_INTERVAL_S):
            passed_s = time.monotonic() - began_at
            if not sockets.failures() or libraries.handles_exception(threading.main_thread()):
                continue
            if passed_s > self._most_refusals_s:
                exit_for_replacement("the script has caught the error of a collective, and has gone on without a tick")
            if passed_s > _WARN_OF_GOING_ON_S and not has_warned:
                has_warned = True
                logger.warning(
                    "a collective of this world failed %.0f s ago, and the script goes on without a tick. If it has "
                    "caught the error, with a bare except or except RuntimeError, it must raise it again. The others "
                    "wait, and after %g s this worker is replaced.",
                    passed_s,
                    self._most_refusals_s,
                )

    def _report_hang(self, generation: int) -> None:
        """Report where this worker was when the generation ended, if that was because it hangs.

        The END of a hang frees the other members. One of them may end the generation by itself, because of the error of
        its collective, before the END reaches it. It then reports after READY, where it waits for the END.
        """
        end = self._last_end()
        if end is not None and end.hang and not self._has_reported_hang:
            self._has_reported_hang = True
            self._send_where(generation, self._own_end)

    def _send_where(self, generation: int, text: str = "") -> None:
        """Send the last collectives, and the place of the main thread. ``text``: the error with which it left there."""
        from elasticstate.compat import process_groups  # here, so that this module can be imported without torch

        stack = libraries.stack_of(threading.main_thread())
        entered = process_groups.last_collectives(self._entered_ns)
        where = text or "".join(stack.format())
        line = "" if text else tracebacks.line_of(stack)
        self.send(messages.CollectivesReport(generation, entered, where[-_LONGEST_STACK:], line))

    def _cut(self, generation: int, context: Context) -> None:
        """Cut from Python, on a separate thread, from the end of the generation until it has been left."""
        while self._native.wait_end(generation):
            context.sever()
            time.sleep(_SWEEP_INTERVAL_S)

    def _watch(self, generation: int, context: Context) -> None:
        """End the generation, on a separate thread, when its backend has found a failure that nobody else sees."""
        while not self._has_left.wait(_WATCH_INTERVAL_S) and not self.has_ended(generation):
            if failure := context.own_failure():
                logger.warning("generation %d ends: %s", generation, failure)
                self._end(generation, failure)

    def formed(self) -> None:
        """Record that the process groups of the present generation exist."""
        self._formed_at = time.monotonic()

    def begin_training(self) -> None:
        """Mark the start of the user's function: the generation is created and synced."""
        self._follow_handlers()
        self._native.begin_training(time.monotonic() - self._formed_at)
        self.check()

    def add_commit_time(self, seconds: float) -> None:
        """Count time that a tick has spent in a commit."""
        self._page.add_commit_s(seconds)

    def may_commit(self) -> None:
        """Raise CollectiveError if the lease on the ticks of this generation is over: a newer world may exist."""
        if not self._native.in_lease():
            raise CollectiveError(self.cause)

    def tick(self) -> None:
        """End a tick. This costs one atomic operation unless a hold or an end is pending.

        Raises HostsUpdatedInterrupt at the tick where all members leave, and CollectiveError if the generation is over;
        at each later tick again, if the script catches that.
        """
        if self._tick_end is not None:
            self.check_ticks()
        if libraries.handler_of(signal.SIGTERM) is not self._stop_handler:
            self._follow_handlers()
        end = self._native.tick()
        if end is not None:
            self._raise_end(end)

    @property
    def has_interrupted(self) -> bool:
        """True if a tick of the present generation has raised the interrupt, whatever caught it."""
        return self._tick_end is _native.TickEnd.INTERRUPTED

    def check_ticks(self) -> None:
        """Raise what the last tick of this generation has raised, if it has. No commit and no tick follows it."""
        if self._tick_end is None:
            return
        self.refuse()
        self.has_gone_on |= not _is_leaving_script(HostsUpdatedInterrupt)
        self._raise_end(self._tick_end)

    def refuse(self, is_told: bool = True) -> None:
        """Record that a commit or tick is refused, because the generation is over and the script goes on.

        The other members wait for this worker, for --regroup-timeout. If the script still goes on then, this process
        ends, and another one takes its slot. ``is_told``: the script knows that already, from an earlier exception.
        """
        now = time.monotonic()
        if _is_leaving_script(HostsUpdatedInterrupt, RuntimeError):
            return  # a finally clause ends a tick, for example
        is_first = self._refused_at is None
        self._refused_at = self._refused_at or now
        if not self._has_warned and (is_told or not is_first):
            self._has_warned = True
            logger.warning(
                "the script has caught the exception that ends generation %d, so each commit() and "
                "check_host_updates() raises from now on. Do not catch HostsUpdatedInterrupt and CollectiveError, and "
                "raise the errors of collectives again.",
                self.generation,
            )
        elif now - self._refused_at > self._most_refusals_s:
            exit_for_replacement("the script has caught the end of its world, and has gone on")

    def _raise_end(self, end: _native.TickEnd) -> None:
        self._tick_end = end
        if end is _native.TickEnd.INTERRUPTED:
            raise HostsUpdatedInterrupt(self.cause)
        if end is _native.TickEnd.BEYOND:
            raise CollectiveError(f"tick {self.ticks} comes after the tick at which all members left the generation")
        raise CollectiveError(self.cause)

    def is_own_error(self, error: str) -> bool:
        """Request the verdict on this worker's exception. Return True for an own error, False for a broken world."""
        self.send(messages.GenerationFailure(self.generation, False, error))
        return self._native.wait_verdict(self.generation)

    def report_failure(self, error: str) -> None:
        """End the present generation and report its failure, if it has not ended already."""
        self._end(self.generation, error)

    def _end(self, generation: int, error: str) -> None:
        end = messages.encode_to_worker(messages.End(generation, None, error))
        if self._native.end(generation, end):
            self._own_end = error
            self.send(messages.GenerationFailure(generation, True, error))

    def wait_in_gate(self) -> None:
        """Wait in the exit gate for all members. Raises CollectiveError if the generation ends before that."""
        self._native.set_place(Place.GATE)
        self.send(messages.Gate(self.generation, self._page.commit_s))
        if not self._native.wait_gate(self.generation):
            raise CollectiveError(self.cause)

    def leave(self) -> None:
        """Stop the cutting: nothing of the generation remains in this process."""
        self._has_left.set()
        if self.has_ended(self.generation):
            self._has_reported.wait()  # its thread may not have begun
        self._native.left()
        self._has_reported.wait()  # Python 3.11 aborts a process that ends while a thread returns from native code
        while self._helpers:
            self._helpers.pop().join()


def _is_leaving_script(*kinds: type[BaseException]) -> bool:
    """Return True if an exception of one of these kinds is being handled, or was the reason for the one that is."""
    error = sys.exc_info()[1]
    return error is not None and any(isinstance(link, kinds) for link in error_chain(error))


_started: weakref.WeakSet[Sentinel] = weakref.WeakSet()


def _in_child() -> None:
    for sentinel in list(_started):
        sentinel._detach_forked()
    _started.clear()


def _call_if_alive(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (method := reference()) is not None:
        method()


os.register_at_fork(after_in_child=_in_child)
