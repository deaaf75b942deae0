"""The hold word: whatever the schedule, all workers raise at the same tick, and nobody passes K before knowing it."""

from __future__ import annotations

import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from elasticstate._native import HoldWord
from elasticstate.core.types import Placement, WorkerId
from elasticstate.errors import CollectiveError, HostsUpdatedInterrupt
from elasticstate.net import messages
from elasticstate.worker import sentinel as sentinel_module
from elasticstate.worker.sentinel import Sentinel

GENERATION = 3
ME = WorkerId("h", 0, 1)
PLACE = Placement(ME, 0, 0, 1, True, 0, 1)
WORLD = messages.WorldMessage("job", GENERATION, PLACE, 1, 0, (), "h:1", 60.0, 60.0)


class Heard:
    """The worker's end of a link to nobody: keeps what is said."""

    def __init__(self) -> None:
        self.said: list[messages.FromWorkerBody] = []
        self._ends = socket.socketpair()

    def send(self, message: messages.FromWorkerBody) -> None:
        self.said.append(message)

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def close(self) -> None:
        for end in self._ends:
            end.close()


class Uncut:
    def sever(self) -> None:
        raise AssertionError("nothing to cut here")


class Worker:
    """A sentinel in a generation, without its own thread: the test says when it hears what."""

    def __init__(self) -> None:
        self.link = Heard()
        self.sentinel = Sentinel(self.link, ME)  # type: ignore[arg-type]
        self.sentinel.enter(WORLD, Uncut())
        self.ended_at: int | None = None
        self.failure: BaseException | None = None

    def hear(self, message: messages.ToWorkerBody) -> None:
        with self.sentinel._changed:
            self.sentinel._apply(message)
            self.sentinel._changed.notify_all()

    def answer(self) -> messages.HoldAnswer:
        return next(m for m in self.link.said if isinstance(m, messages.HoldAnswer))

    def train(self, ticks: int, wait: Callable[[int], None]) -> None:
        try:
            for tick in range(ticks):
                wait(tick)
                self.sentinel.tick()
        except HostsUpdatedInterrupt:
            self.ended_at = self.sentinel.ticks
        except CollectiveError as error:
            self.failure = error

    def close(self) -> None:
        self.link.close()
        self.sentinel._wake_reader.close()
        self.sentinel._wake_writer.close()


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def agree(workers: list[Worker], then: Callable[[], None]) -> int:
    """HOLD to all, END at K = 1 + max of the answers; ``then`` is what happens between the messages."""
    for worker in workers:
        worker.hear(messages.HoldOrder(GENERATION))
        then()
    last = 1 + max(worker.answer().ticks for worker in workers)
    for worker in workers:
        then()
        worker.hear(messages.EndOrder(GENERATION, last, "test"))
    return last


@pytest.mark.parametrize(("collective", "schedules"), [(True, 3000), (False, 300)], ids=["with_collectives", "without"])
def test_all_raise_at_the_same_tick_over_thousands_of_schedules(
    quick_switches: None, collective: bool, schedules: int
) -> None:
    random_state = random.Random(7)
    later_than_hold = 0
    for schedule in range(schedules):
        workers = [Worker() for _ in range(3)]
        barrier = threading.Barrier(3)
        started = threading.Event()

        def wait(tick: int, barrier: threading.Barrier = barrier, started: threading.Event = started) -> None:
            if tick == 2:
                started.set()
            if collective:
                try:
                    barrier.wait()
                except threading.BrokenBarrierError:
                    raise CollectiveError("a peer is gone") from None

        threads = [threading.Thread(target=worker.train, args=(10**9, wait)) for worker in workers]
        for thread in threads:
            thread.start()
        started.wait()

        def pause() -> None:
            for _ in range(random_state.choice((0, 0, 1, 10, 100))):
                pass

        last = agree(workers, pause)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), f"schedule {schedule}: a worker still waits"
        assert [worker.ended_at for worker in workers] == [last] * 3, f"schedule {schedule}"
        later_than_hold += any(worker.answer().ticks + 1 < last for worker in workers)
        for worker in workers:
            worker.close()
    assert later_than_hold > 20, "the schedules never let one worker get ahead of another"


class Stepped:
    """A hold word whose sentinel stops at a named point until the worker's thread has come as far as it can."""

    def __init__(self, point: str, reached: threading.Event, go_on: threading.Event) -> None:
        self._word = HoldWord()
        self._point, self._reached, self._go_on = point, reached, go_on

    def _at(self, point: str) -> None:
        if point == self._point and threading.current_thread() is threading.main_thread():
            self._reached.set()
            assert self._go_on.wait(10)

    def add_tick(self) -> int:
        return self._word.add_tick()

    def hold(self) -> int:
        self._at("before hold")
        old = self._word.hold()
        self._at("after hold")
        return old

    def clear(self) -> None:
        self._at("before clear")
        self._word.clear()
        self._at("after clear")

    def reset(self) -> None:
        self._word.reset()

    def load(self) -> int:
        return self._word.load()


@pytest.mark.parametrize("point", ["before hold", "after hold"])
def test_a_sentinel_delayed_at_any_point_of_a_hold_loses_no_tick(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    word = Stepped(point, reached, go_on)
    monkeypatch.setattr(sentinel_module, "HoldWord", _constant(word))
    worker = Worker()
    begun, allowed = threading.Semaphore(0), threading.Semaphore(2)

    def wait(tick: int) -> None:
        allowed.acquire()
        begun.release()

    thread = threading.Thread(target=worker.train, args=(10**9, wait))
    thread.start()
    begun.acquire()
    begun.acquire()

    def let_the_worker_run() -> None:
        reached.wait()
        allowed.release()  # one more tick while the sentinel stands still
        begun.acquire()
        go_on.set()
        for _ in range(5):
            allowed.release()

    helper = threading.Thread(target=let_the_worker_run)
    helper.start()
    last = agree([worker], lambda: None)
    thread.join(10)
    helper.join(10)
    assert not thread.is_alive()
    assert worker.ended_at == last == worker.answer().ticks + 1
    worker.close()


def _constant(word: Stepped) -> type:
    class Made:
        HOLD = HoldWord.HOLD

        def __new__(cls) -> Stepped:  # type: ignore[misc]
            return word

    return Made


def test_a_released_hold_interrupts_nobody_and_can_be_repeated() -> None:
    worker = Worker()
    worker.hear(messages.HoldOrder(GENERATION))
    worker.hear(messages.ReleaseOrder(GENERATION))
    for _ in range(3):
        worker.sentinel.tick()
    worker.hear(messages.HoldOrder(GENERATION))
    worker.hear(messages.EndOrder(GENERATION, 5, "test"))
    worker.sentinel.tick()
    with pytest.raises(HostsUpdatedInterrupt):
        worker.sentinel.tick()
    worker.close()


def test_orders_for_another_generation_have_no_effect() -> None:
    worker = Worker()
    for other in (GENERATION - 1, GENERATION + 1):
        worker.hear(messages.HoldOrder(other))
        worker.hear(messages.EndOrder(other, 1, "test"))
    worker.hear(messages.EndOrder(GENERATION - 1, None, "test"))
    worker.hear(messages.OwnError(GENERATION - 1))
    worker.hear(messages.GateOpen(GENERATION - 1))
    worker.sentinel.tick()
    worker.sentinel.tick()
    assert worker.sentinel.ticks == 2
    worker.close()


def test_an_end_that_comes_before_its_generation_is_sticky() -> None:
    worker = Worker()
    worker.hear(messages.EndOrder(GENERATION + 1, None, "too early"))
    worker.sentinel.left()
    later = messages.WorldMessage("job", GENERATION + 1, PLACE, 1, 0, (), "h:1", 60.0, 60.0)
    worker.sentinel.enter(later, Uncut())
    with pytest.raises(CollectiveError, match="too early"):
        worker.sentinel.check()
    worker.close()


def test_a_verdict_of_own_and_one_of_broken() -> None:
    own, broken = Worker(), Worker()
    verdicts: list[bool] = []
    for worker, message in (
        (own, messages.OwnError(GENERATION)),
        (broken, messages.EndOrder(GENERATION, None, "lost a peer")),
    ):
        asked = threading.Thread(target=lambda w=worker: verdicts.append(w.sentinel.is_own_error("ValueError")))
        asked.start()
        worker.hear(message)
        asked.join(10)
        assert not asked.is_alive()
        worker.close()
    assert verdicts == [True, False]
