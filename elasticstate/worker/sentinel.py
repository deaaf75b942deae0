"""The sentinel: one thread per worker that owns the socket to the agent.

It stamps liveness, answers HOLD, applies END, RELEASE and the verdicts, and cuts an ended generation until the worker
has left it. Everything it knows is *level*, not edge: ``ended >= g`` is sticky, so an END that comes before there is
anything to cut still works.

The tick, and the hold, in one 64-bit word (:class:`elasticstate._native.HoldWord`)::

    worker: end of a tick   old = fetch_add(1)     old has HOLD?  wait, or raise when this is tick K
    sentinel: HOLD          old = fetch_or(HOLD)   answer: old's ticks; the worker waits at the end of the next one

Both act on the *returned* value, and the wait comes after the save. So whoever answered ``t`` waits at the end of tick
``t + 1`` at the latest, nobody passes K = 1 + max t before knowing K, and all raise at the same tick.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Protocol

from elasticstate._native import ControlPage, HoldWord
from elasticstate.core.types import CommitId, WorkerId
from elasticstate.errors import CollectiveError, HostsUpdatedInterrupt
from elasticstate.net import messages
from elasticstate.net.link import WorkerLink
from elasticstate.net.messages import Place

STAMP_INTERVAL_S = 0.25
SWEEP_INTERVAL_S = 0.003
_TICKS = HoldWord.HOLD - 1


class Severable(Protocol):
    """What the sentinel needs of a context: ``sever`` may be called from any thread, any number of times."""

    def sever(self) -> None: ...


class Sentinel:
    """Speaks with the agent for the worker. One per process; ``start()`` it once."""

    def __init__(self, link: WorkerLink, worker: WorkerId, page: ControlPage | None = None) -> None:
        self._link = link
        self._worker = worker
        self._page = page or ControlPage(None)
        self._word = HoldWord() if page is None else page.word
        self._changed = threading.Condition()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._context: Severable | None = None  # of the generation that is not left yet
        self._place = Place.BOOT
        self._generation = 0
        self._world: messages.WorldMessage | None = None  # the newest one heard of
        self._commit: CommitId | None = None
        self._previous: CommitId | None = None
        self._ended = 0  # the highest generation that has ended now
        self._cause = ""
        self._held = False
        self._end_tick: int | None = None  # END at this tick of the present generation
        self._paused_at: float | None = None  # when the tick at which the worker was stopped ended
        self._own_error = 0  # the generation for which the verdict was OWN
        self._open_gate = 0  # the newest generation whose gate is open
        self._leaving = False

    # ---------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Say hello, and run from now on. Call it on the main thread: it also takes notice of SIGTERM."""
        self._link.send(messages.Hello(self._worker, os.getpid(), messages.PROTOCOL_VERSION))
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._serve, name="elasticstate-sentinel", daemon=True).start()

    def finish(self) -> None:
        """The worker is behind the gate: from here on it is a plain process that ends in its own time."""
        with self._changed:
            self._go(Place.DONE)
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # -------------------------------------------------------------------------------------------- the worker's side

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def ticks(self) -> int:
        """Ticks completed in the present generation."""
        return self._word.load() & _TICKS

    @property
    def cause(self) -> str:
        """Why the last generation ended."""
        return self._cause

    @property
    def leaving(self) -> bool:
        return self._leaving

    def ended(self, generation: int) -> bool:
        """Whether ``generation`` is over. Sticky."""
        return self._ended >= generation

    @property
    def in_generation(self) -> bool:
        """Whether a generation has been entered and not left yet."""
        return self._context is not None

    def check(self) -> None:
        """Raise CollectiveError if the present generation is over: to be called before each step of regroup."""
        if self.ended(self._generation):
            raise CollectiveError(self._cause)

    def sealed(self, commit: CommitId | None, previous: CommitId | None) -> None:
        """Both buffers' ids, for the stamps. A generation's first commit is told at once: the job has committed."""
        known, self._commit, self._previous = self._commit, commit, previous
        if (
            commit is not None
            and commit.tick
            and (known is None or (known.generation, known.tick) < (commit.generation, 1))
        ):
            self.say(messages.Committed(commit))

    def say(self, message: messages.FromWorkerBody) -> None:
        self._link.send(message)

    def ready(self, store: str) -> messages.WorldMessage:
        """Say READY and wait for the next world. Raises SystemExit(0) when told to LEAVE."""
        with self._changed:
            self._go(Place.REGROUP)
            paused_s = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at
            joined = self._generation
        self.say(messages.Ready(joined, self._commit, self._previous, store, self.ticks, paused_s))
        with self._changed:
            while not self._leaving:
                world = self._world
                if world is not None and world.generation > joined:
                    return world
                self._changed.wait()
        raise SystemExit(0)

    def enter(self, world: messages.WorldMessage, context: Severable) -> None:
        """Begin a generation: ticks count from 0, and ``context`` is cut when it ends."""
        with self._changed:
            self._generation = world.generation
            self._word.reset()
            self._page.enter(world.generation)
            self._held = False
            self._end_tick = None
            self._paused_at = None
            self._context = context

    def train(self) -> None:
        """The generation is made and synced: the user's function has the word."""
        with self._changed:
            self._go(Place.TRAIN)
        self.check()

    def tick(self) -> None:
        """End a tick. One atomic operation unless somebody wants something.

        Raises HostsUpdatedInterrupt when this is the tick that all leave at, CollectiveError when the generation is
        over.
        """
        old = self._word.add_tick()
        if old & HoldWord.HOLD or not old:
            self._look_up((old & _TICKS) + 1)

    def _look_up(self, ticks: int) -> None:
        if ticks == 1:
            self.say(messages.First(self._generation))
        stopped_at = time.monotonic()
        with self._changed:
            while True:
                if self._ended >= self._generation:
                    raise CollectiveError(self._cause)
                if self._end_tick is not None:
                    if ticks < self._end_tick:
                        return
                    if ticks > self._end_tick:
                        raise CollectiveError(f"tick {ticks} is beyond the tick {self._end_tick} that all leave at")
                    self._paused_at = stopped_at
                    raise HostsUpdatedInterrupt(self._cause)
                if not self._held:
                    return
                self._changed.wait()

    def is_own_error(self, error: str) -> bool:
        """A suspect asks for the verdict: True: its exception is its own. False: the generation is broken."""
        generation = self._generation
        self.say(messages.Failure(generation, False, error))
        with self._changed:
            while self._ended < generation and self._own_error < generation:
                self._changed.wait()
            return self._own_error >= generation

    def failed(self, error: str) -> None:
        """The present generation is broken, by fact: nobody uses it any more."""
        generation = self._generation
        with self._changed:
            known = self._ended >= generation
            self._end_now(generation, error)
        if not known:
            self.say(messages.Failure(generation, True, error))

    def gate(self) -> None:
        """Wait in the exit gate until all members are there; CollectiveError if the generation ends before that."""
        generation = self._generation
        with self._changed:
            self._go(Place.GATE)
        self.say(messages.Gate(generation))
        with self._changed:
            while self._open_gate < generation:
                if self._ended >= generation:
                    raise CollectiveError(self._cause)
                self._changed.wait()

    def left(self) -> None:
        """Nothing of the generation is left in this process: the sweeping ends."""
        with self._changed:
            self._context = None

    # ---------------------------------------------------------------------------------------------- the own thread

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._link.fileno(), select.POLLIN)
        poller.register(self._wake_reader.fileno(), select.POLLIN)
        next_stamp = time.monotonic()
        while True:
            sweeping = self._sweep()
            now = time.monotonic()
            if now >= next_stamp:
                self._page.beat()
                next_stamp = now + STAMP_INTERVAL_S
            wait_s = SWEEP_INTERVAL_S if sweeping else next_stamp - now
            for fd, _ in poller.poll(max(0.0, wait_s) * 1000):
                if fd == self._link.fileno():
                    self._receive()
                else:
                    self._woken()

    def _go(self, place: Place) -> None:
        self._place = place
        self._page.set_place(place)

    def _sweep(self) -> bool:
        """Cut what has ended and is not left yet. Tells whether there is such a thing."""
        with self._changed:
            context = self._context if 0 < self._generation <= self._ended else None
        if context is None:
            return False
        context.sever()
        return True

    def _receive(self) -> None:
        try:
            message = self._link.receive()
        except BlockingIOError:
            return
        if message is None:
            self._link_lost()
            return
        with self._changed:
            self._apply(message)
            self._changed.notify_all()

    def _apply(self, message: messages.ToWorkerBody) -> None:
        match message:
            case messages.WorldMessage():
                self._world = message
            case messages.HoldOrder(generation=generation) if generation == self._generation:
                self._held = True
                ticks = self._word.hold() & _TICKS
                self.say(messages.HoldAnswer(generation, ticks, self._place == Place.GATE))
            case messages.ReleaseOrder(generation=generation) if generation == self._generation:
                self._held = False
                if self._end_tick is None and self._ended < generation:
                    self._word.clear()
            case messages.EndOrder(at_tick=None):
                self._end_now(message.generation, message.cause)
            case messages.EndOrder(generation=generation) if generation == self._generation:
                self._cause = message.cause
                self._end_tick = message.at_tick
                self._word.hold()
            case messages.OwnError(generation=generation):
                self._own_error = max(self._own_error, generation)
            case messages.GateOpen(generation=generation):
                self._open_gate = max(self._open_gate, generation)
            case messages.LeaveOrder():
                self._leave()
            case _:
                pass  # an order for a generation that is over here

    def _end_now(self, generation: int, cause: str) -> None:
        if generation > self._ended:
            self._ended = generation
            self._cause = cause
            self._word.hold()  # the next tick looks up
            self._changed.notify_all()
            self._wake()

    def _leave(self) -> None:
        self._leaving = True
        match self._place:
            case Place.REGROUP:
                pass  # ready() raises SystemExit
            case Place.BOOT:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
            case Place.DONE:
                os.kill(os.getpid(), signal.SIGTERM)
            case _:
                self._end_now(self._generation, "told to leave")
                os.kill(os.getpid(), signal.SIGTERM)  # reaches the main thread in a system call, too

    def _on_sigterm(self, signum: int, frame: object) -> None:
        if self._leaving:
            raise SystemExit(0)

    def _woken(self) -> None:
        signals = self._wake_reader.recv(4096)
        if signal.SIGTERM in signals and not self._leaving:
            self.say(messages.Notice())

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it is awake
            self._wake_writer.send(b"\0")

    def _link_lost(self) -> None:
        """The agent is gone: so is the job. A worker does not outlive its agent."""
        if self._place != Place.DONE:
            sys.stderr.write("elasticstate: the agent of this worker is gone; the worker ends\n")
            sys.stderr.flush()
            os._exit(1)
        threading.Event().wait()  # behind the gate: nothing is left to do here
