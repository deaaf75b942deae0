"""The sentinel, as the worker's Python sees it. The work is done by a thread of C++ (``native/sentinel.hpp``).

That thread owns the socket to the agent and never needs the GIL: it beats, answers HOLD, applies END, RELEASE and the
verdicts, and cuts an ended generation. What is left here is to say what only Python knows, to wait (without the GIL,
and so that Ctrl-C and signal handlers work), and to turn what the thread has heard into exceptions.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Protocol, TypeVar

from elasticstate import _native
from elasticstate.core.types import CommitId, WorkerId
from elasticstate.errors import CollectiveError, HostsUpdatedInterrupt
from elasticstate.net import messages, orders
from elasticstate.net.link import encode_from_worker
from elasticstate.net.messages import Place

A = TypeVar("A")


class Connection(Protocol):
    """The connected socket to the agent, which is handed over: ``detach`` gives its descriptor away."""

    def detach(self) -> int: ...


class Severable(Protocol):
    """What the sentinel needs of a context: what to cut when its generation ends."""

    severs_in_python: bool

    @property
    def sockets(self) -> _native.GlooSockets: ...

    def sever(self) -> None: ...


_SWEEP_INTERVAL_S = 0.003


class Sentinel:
    """Speaks with the agent for the worker, for as long as it is referenced. One per process; ``start()`` it once.

    Raises OSError: out of descriptors.
    """

    def __init__(self, connection: Connection, worker: WorkerId, page: _native.ControlPage) -> None:
        self._worker = worker
        self._native = _native.Sentinel(page, connection.detach())
        self._commit: CommitId | None = None
        self._previous: CommitId | None = None
        self._notices: list[int] = []  # signals
        self._exits = False
        self._cutter: threading.Thread | None = None

    # ---------------------------------------------------------------------------------------------- start and stop

    def start(self, notices: Iterable[int] = (signal.SIGTERM,)) -> None:
        """Say hello, and run from now on. Call it on the main thread: it also takes notice of these signals, but for
        those that the program itself handles or ignores."""
        self.say(messages.Hello(self._worker, os.getpid(), messages.PROTOCOL_VERSION))
        self._notices = [number for number in notices if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._notices:
            self._native.notice(number)
            signal.signal(number, self._on_notice)
        if self._notices:
            signal.set_wakeup_fd(self._native.signal_fd, warn_on_full_buffer=False)
        self._native.start()
        _started.add(self)

    def finish(self) -> None:
        """The worker is behind the gate: from here on it is a plain process that ends in its own time."""
        self._native.set_place(Place.DONE)
        self._let_signals_go()

    def _let_signals_go(self) -> None:
        ours = [number for number in self._notices if signal.getsignal(number) == self._on_notice]
        if ours:
            signal.set_wakeup_fd(-1)
        for number in ours:
            signal.signal(number, signal.SIG_DFL)

    def _on_notice(self, signum: int, frame: object) -> None:
        if not self.leaving or self._exits:
            return  # the thread has told the agent; or another signal comes while the interpreter ends
        self._exits = True
        if self._native.place == Place.BOOT:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(0)

    def _forked(self) -> None:
        """This is a child of the worker: it has no part in the job, and SIGTERM ends it."""
        self._native.forked()
        self._let_signals_go()

    # -------------------------------------------------------------------------------------------- what is known

    @property
    def generation(self) -> int:
        return self._native.generation

    @property
    def ticks(self) -> int:
        """Ticks completed in the present generation."""
        return self._native.ticks

    @property
    def cause(self) -> str:
        """Why the last generation ended."""
        message = self._native.cause
        if not message:
            return ""
        end = orders.decode_to_worker(message)
        assert isinstance(end, messages.EndOrder)
        return end.cause

    @property
    def leaving(self) -> bool:
        return self._native.leaving

    def ended(self, generation: int) -> bool:
        """Whether ``generation`` is over. Sticky."""
        return self._native.ended(generation)

    @property
    def in_generation(self) -> bool:
        """Whether a generation has been entered and not left yet."""
        return self._native.in_generation

    def check(self) -> None:
        """Raise CollectiveError if the present generation is over: to be called before each step of regroup."""
        if self.ended(self.generation):
            raise CollectiveError(self.cause)

    # ------------------------------------------------------------------------------------------- saying and asking

    def say(self, message: messages.FromWorkerBody) -> None:
        """Tell the agent, now or as soon as it reads."""
        self._native.send(encode_from_worker(message))

    def ask(self, question: messages.FromWorkerBody, answer: type[A]) -> A:
        """Say ``question``, and wait for the agent's message of type ``answer``. Strays are dropped."""
        self.say(question)
        while True:
            message = orders.decode_to_worker(self._native.wait_other())
            if isinstance(message, answer):
                return message

    def sealed(self, commit: CommitId | None, previous: CommitId | None) -> None:
        """Both buffers' ids. The first commit of a generation's ticks is told at once: the job has committed."""
        known, self._commit, self._previous = self._commit, commit, previous
        if commit is not None and commit.tick and (known is None or known < CommitId(commit.generation, 1)):
            self.say(messages.Committed(commit))

    # ------------------------------------------------------------------------------------- the life of a generation

    def ready(self, store: str) -> messages.WorldMessage:
        """Say READY and wait for the next world. Raises SystemExit(0) when told to LEAVE."""
        self._native.set_place(Place.REGROUP)
        joined, paused_s = self.generation, self._native.paused_s
        self.say(messages.Ready(joined, self._commit, self._previous, store, self.ticks, paused_s))
        message = self._native.wait_world(joined)
        if message is None:
            raise SystemExit(0)
        world = orders.decode_to_worker(message)
        assert isinstance(world, messages.WorldMessage)
        return world

    def enter(self, world: messages.WorldMessage, context: Severable) -> None:
        """Begin a generation: ticks count from 0, and ``context`` is cut when it ends."""
        self._native.enter(world.generation, context.sockets)
        if context.severs_in_python:
            self._cutter = threading.Thread(target=self._cut, args=(world.generation, context), daemon=True)
            self._cutter.start()

    def _cut(self, generation: int, context: Severable) -> None:
        """What only Python can cut, on a thread of its own, until the generation has been left."""
        while self._native.wait_end(generation):
            context.sever()
            time.sleep(_SWEEP_INTERVAL_S)

    def train(self) -> None:
        """The generation is made and synced: the user's function has the word."""
        self._native.set_place(Place.TRAIN)
        self.check()

    def may_commit(self) -> None:
        """Raise CollectiveError if the lease on the ticks of this generation is over: there may be a newer world."""
        if not self._native.in_lease():
            raise CollectiveError(self.cause)

    def tick(self) -> None:
        """End a tick. One atomic operation unless somebody wants something.

        Raises HostsUpdatedInterrupt when this is the tick that all leave at, CollectiveError when the generation is
        over.
        """
        end = self._native.tick()
        if end is not None:
            self._stop(end)

    def _stop(self, end: _native.TickEnd) -> None:
        if end is _native.TickEnd.INTERRUPTED:
            raise HostsUpdatedInterrupt(self.cause)
        if end is _native.TickEnd.BEYOND:
            raise CollectiveError(f"tick {self.ticks} is beyond the tick that all leave at")
        raise CollectiveError(self.cause)

    def is_own_error(self, error: str) -> bool:
        """A suspect asks for the verdict: True: its exception is its own. False: the generation is broken."""
        generation = self.generation
        self.say(messages.Failure(generation, False, error))
        return self._native.wait_verdict(generation)

    def failed(self, error: str) -> None:
        """The present generation is broken, by fact: nobody uses it any more."""
        generation = self.generation
        end = orders.encode_to_worker(messages.EndOrder(generation, None, error))
        if self._native.end(generation, end):
            self.say(messages.Failure(generation, True, error))

    def gate(self) -> None:
        """Wait in the exit gate until all members are there; CollectiveError if the generation ends before that."""
        generation = self.generation
        self._native.set_place(Place.GATE)
        self.say(messages.Gate(generation))
        if not self._native.wait_gate(generation):
            raise CollectiveError(self.cause)

    def left(self) -> None:
        """Nothing of the generation is left in this process: the sweeping ends."""
        self._native.left()
        if self._cutter is not None:
            self._cutter.join()
            self._cutter = None


_started: weakref.WeakSet[Sentinel] = weakref.WeakSet()


def _in_child() -> None:
    for sentinel in list(_started):
        sentinel._forked()
    _started.clear()


os.register_at_fork(after_in_child=_in_child)
