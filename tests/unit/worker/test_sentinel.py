"""The sentinel with its real thread, at the other end of a real socket: messages, answers and exceptions."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elasticstate import _native
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.types import MemberOptions, Placement
from elasticstate.errors import CollectiveError, HostsUpdatedInterrupt
from elasticstate.net import messages
from elasticstate.net.link import MAX_DATAGRAM_BYTES
from elasticstate.worker.contexts.gloo import GlooContext
from elasticstate.worker.sentinel import Sentinel

GENERATION = 3
ME = WorkerId("h", 0, 1)
PLACE = Placement(ME, 0, 0, 1, 0, 0, 1)
LONG_S = 20.0


def world(generation: int) -> messages.World:
    return messages.World(generation, (PLACE,), 1, 0, (), "h:1", options=MemberOptions(60.0, 60.0, False, False))


class Worker:
    """A worker in a generation. The test plays its agent."""

    def __init__(self, reports: bool = False) -> None:
        self.agent, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.agent.settimeout(LONG_S)
        self.page = _native.ControlPage(None)
        self.sentinel = Sentinel(mine.detach(), ME, self.page, reports)
        self.sentinel.start()
        self.sentinel.enter(world(GENERATION), GlooContext())
        self.ended_at: int | None = None
        self.failure: BaseException | None = None

    def hear(self, message: messages.ToWorkerBody) -> None:
        self.agent.send(messages.encode_to_worker(message))

    def said(self) -> messages.FromWorkerBody:
        """Return the next message."""
        return messages.decode_from_worker(self.agent.recv(MAX_DATAGRAM_BYTES))  # type: ignore[no-any-return]

    def answer(self) -> messages.HoldAnswer:
        while True:
            message = self.said()
            if isinstance(message, messages.HoldAnswer):
                return message

    def settle(self) -> None:
        """Wait until the worker has received all messages that were sent to it."""
        self.hear(messages.Hold(self.sentinel.generation))
        self.answer()
        self.hear(messages.Release(self.sentinel.generation))

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
        self.sentinel.finish()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next sentinel of this process begins anew
        self.agent.close()
        del self.sentinel


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# ----------------------------------------------------------------------------------------------------- hold protocol


@pytest.mark.parametrize(
    ("collective", "schedules"),
    [
        pytest.param(True, 600, id="with_collectives"),
        pytest.param(False, 100, id="without"),
        pytest.param(True, 3000, id="with_collectives, long", marks=pytest.mark.long),
        pytest.param(False, 300, id="without, long", marks=pytest.mark.long),
    ],
)
def test_all_raise_at_the_same_tick_over_many_schedules(quick_switches: None, collective: bool, schedules: int) -> None:
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

        def pause() -> None:
            for _ in range(random_state.choice((0, 0, 1, 10, 100))):
                pass

        threads = [threading.Thread(target=worker.train, args=(10**9, wait)) for worker in workers]
        for thread in threads:
            thread.start()
        started.wait()
        for worker in workers:
            worker.hear(messages.Hold(GENERATION))
            pause()
        answers = [worker.answer().ticks for worker in workers]
        last = 1 + max(answers)
        for worker in workers:
            pause()
            worker.hear(messages.End(GENERATION, last, "test"))
        for thread in threads:
            thread.join(LONG_S)
            assert not thread.is_alive(), f"schedule {schedule}: a worker still waits"
        assert [worker.ended_at for worker in workers] == [last] * 3, f"schedule {schedule}"
        later_than_hold += min(answers) + 1 < last
        for worker in workers:
            worker.close()
    assert later_than_hold > 20, "the schedules never let one worker get ahead of another"


def test_a_released_hold_interrupts_nobody_and_can_be_repeated(worker: Worker) -> None:
    worker.hear(messages.Hold(GENERATION))
    assert worker.answer() == messages.HoldAnswer(GENERATION, 0, False)
    worker.hear(messages.Release(GENERATION))
    for _ in range(3):
        worker.sentinel.tick()
    worker.hear(messages.Hold(GENERATION))
    assert worker.answer() == messages.HoldAnswer(GENERATION, 3, False)
    worker.hear(messages.End(GENERATION, 5, "a host joins"))
    worker.sentinel.tick()
    with pytest.raises(HostsUpdatedInterrupt, match="a host joins"):
        worker.sentinel.tick()
    assert worker.sentinel.ticks == 5


def test_orders_for_another_generation_have_no_effect(worker: Worker) -> None:
    for other in (GENERATION - 1, GENERATION + 1):
        worker.hear(messages.Hold(other))
        worker.hear(messages.End(other, 1, "test"))
    worker.hear(messages.End(GENERATION - 1, None, "test"))
    worker.hear(messages.ConfirmOwnError(ME, GENERATION - 1))
    worker.hear(messages.OpenGate(GENERATION - 1))
    worker.settle()
    worker.sentinel.tick()
    worker.sentinel.tick()
    assert worker.sentinel.ticks == 2
    worker.sentinel.check()


def test_a_release_after_the_end_at_a_tick_takes_nothing_back(worker: Worker) -> None:
    worker.hear(messages.Hold(GENERATION))
    worker.hear(messages.End(GENERATION, 1, "test"))
    worker.hear(messages.Release(GENERATION))
    worker.settle()
    with pytest.raises(HostsUpdatedInterrupt):
        worker.sentinel.tick()


def test_an_interrupt_that_was_caught_is_raised_again_and_the_tick_does_not_count(worker: Worker) -> None:
    worker.hear(messages.Hold(GENERATION))
    worker.hear(messages.End(GENERATION, 1, "test"))
    worker.settle()
    with pytest.raises(HostsUpdatedInterrupt):
        worker.sentinel.tick()
    assert worker.sentinel.has_interrupted
    try:
        raise HostsUpdatedInterrupt
    except HostsUpdatedInterrupt:
        with pytest.raises(HostsUpdatedInterrupt):
            worker.sentinel.tick()  # in a finally clause, for example
    assert not worker.sentinel.has_gone_on
    for again in (worker.sentinel.tick, worker.sentinel.check_ticks):
        with pytest.raises(HostsUpdatedInterrupt):
            again()
    assert worker.sentinel.has_gone_on
    assert worker.sentinel.ticks == 1
    worker.sentinel.enter(world(GENERATION + 1), GlooContext())
    worker.sentinel.tick()
    assert not worker.sentinel.has_gone_on


def test_the_end_of_a_generation_is_raised_at_each_later_tick(worker: Worker) -> None:
    worker.sentinel.report_failure("test")
    for _ in range(3):
        with pytest.raises(CollectiveError, match="test"):
            worker.sentinel.tick()
    assert worker.sentinel.ticks == 1


def test_a_tick_beyond_the_last_one_is_a_failure(worker: Worker) -> None:
    worker.sentinel.tick()
    worker.sentinel.tick()
    worker.hear(messages.End(GENERATION, 2, "test"))
    worker.settle()
    with pytest.raises(CollectiveError, match="tick 3 comes after"):
        worker.sentinel.tick()


def test_no_tick_is_made_and_nothing_committed_when_the_lease_is_over(worker: Worker) -> None:
    worker.page.set_lease(2**62)
    worker.sentinel.tick()
    worker.sentinel.may_commit()
    assert not worker.sentinel.has_ended(GENERATION)
    worker.page.set_lease(1)
    with pytest.raises(CollectiveError, match="lease expired"):
        worker.sentinel.may_commit()
    assert worker.sentinel.has_ended(GENERATION)
    worker.page.set_lease(2**62)
    with pytest.raises(CollectiveError, match="--lease"):
        worker.sentinel.tick()  # the lease may have been over for the others, so its end is final
    worker.sentinel.enter(world(GENERATION + 1), GlooContext())
    worker.sentinel.tick()


def test_it_says_where_the_main_thread_is_while_that_thread_is_stuck() -> None:
    worker = Worker(reports=True)
    for _ in range(2):
        worker.hear(messages.AskWhere(GENERATION - 1))  # of another generation: no answer
        worker.hear(messages.AskWhere(GENERATION))
        message = worker.said()  # the main thread is here
        while not isinstance(message, messages.CollectivesReport):
            message = worker.said()
        assert (message.generation, message.collectives) == (GENERATION, ())
        assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in (hear|said): .*self\.agent\.(send|recv).*", message.line)
        assert re.search(r", in (hear|said)\n", message.stack)
    worker.settle()
    worker.sentinel.leave()  # the thread ends
    worker.close()


@pytest.mark.parametrize("hang", [True, False])
def test_a_worker_that_ends_a_generation_before_its_end_arrives_reports_a_hang_all_the_same(hang: bool) -> None:
    """The END of a hang frees the others: one of them may get the error of its collective first."""
    worker = Worker(reports=True)
    worker.sentinel.report_failure("connection closed by peer")
    worker.sentinel.leave()
    worker.hear(messages.End(GENERATION, None, "no tick for 5 s", hang))
    worker.hear(world(GENERATION + 1))
    assert worker.sentinel.ready("store:1") == world(GENERATION + 1)
    assert worker.sentinel.cause == "no tick for 5 s"
    worker.sentinel.send(messages.CommitSize(1))
    said = iter(worker.said, messages.CommitSize(1))
    found = [message for message in said if isinstance(message, messages.CollectivesReport)]
    expected = messages.CollectivesReport(GENERATION, (), "connection closed by peer")
    assert found == [expected] * hang
    worker.close()


def test_a_worker_that_no_end_reaches_enters_the_next_world_all_the_same() -> None:
    worker = Worker(reports=True)
    worker.sentinel.report_failure("connection closed by peer")
    worker.sentinel.leave()
    worker.hear(world(GENERATION + 1))
    assert worker.sentinel.ready("store:1") == world(GENERATION + 1)
    worker.close()


def test_a_wait_ends_with_the_lease(worker: Worker) -> None:
    threading.Timer(0.05, worker.page.set_lease, (1,)).start()
    with pytest.raises(CollectiveError, match="--lease"):
        worker.sentinel.wait_in_gate()


def test_an_end_that_comes_before_its_generation_is_sticky(worker: Worker) -> None:
    worker.hear(messages.End(GENERATION + 1, None, "too early"))
    worker.settle()
    worker.sentinel.leave()
    worker.sentinel.enter(world(GENERATION + 1), GlooContext())
    with pytest.raises(CollectiveError, match="too early"):
        worker.sentinel.check()
    with pytest.raises(CollectiveError, match="too early"):
        worker.sentinel.tick()


def test_the_end_of_an_older_generation_does_not_replace_the_cause(worker: Worker) -> None:
    worker.hear(messages.End(GENERATION, None, "the cause"))
    worker.hear(messages.End(GENERATION - 1, None, "an older one"))
    worker.settle()
    with pytest.raises(CollectiveError, match="the cause"):
        worker.sentinel.tick()
    assert worker.sentinel.cause == "the cause"


def test_a_verdict_of_own_and_one_of_broken() -> None:
    for message, own in (
        (messages.ConfirmOwnError(ME, GENERATION), True),
        (messages.End(GENERATION, None, "lost a peer"), False),
    ):
        worker = Worker()
        verdicts: list[bool] = []
        asked = threading.Thread(target=lambda w=worker, v=verdicts: v.append(w.sentinel.is_own_error("ValueError")))
        asked.start()
        assert worker.said() == messages.Hello(ME, os.getpid(), messages.PROTOCOL_VERSION)
        assert worker.said() == messages.GenerationFailure(GENERATION, False, "ValueError")
        worker.hear(message)
        asked.join(LONG_S)
        assert verdicts == [own]
        worker.close()


def test_the_gate_opens_or_the_generation_ends() -> None:
    for message, failure in (
        (messages.OpenGate(GENERATION), None),
        (messages.End(GENERATION, None, "a peer died"), "a peer died"),
    ):
        worker = Worker()
        worker.hear(message)
        if failure is None:
            worker.sentinel.wait_in_gate()
        else:
            with pytest.raises(CollectiveError, match=failure):
                worker.sentinel.wait_in_gate()
        worker.hear(messages.Hold(GENERATION))
        assert worker.answer().in_gate
        worker.close()


def test_ready_gets_the_newest_world_and_says_how_long_the_worker_has_stood_still(worker: Worker) -> None:
    commit = CommitId(GENERATION, 2)
    worker.sentinel.record_commits(commit, None)
    worker.hear(messages.End(GENERATION, 1, "test"))
    worker.settle()
    with pytest.raises(HostsUpdatedInterrupt):
        worker.sentinel.tick()
    worker.sentinel.leave()
    time.sleep(0.01)
    worker.hear(world(GENERATION))  # a repeated message, about the generation that has just ended
    worker.hear(world(GENERATION + 2))
    assert worker.sentinel.ready("store:1") == world(GENERATION + 2)
    while not isinstance(ready := worker.said(), messages.Ready):
        pass
    assert (ready.generation, ready.commit, ready.previous, ready.store, ready.ticks) == (3, commit, None, "store:1", 1)
    assert 0.01 <= ready.paused_s < LONG_S


def test_a_failure_by_fact_is_told_once(worker: Worker) -> None:
    worker.sentinel.report_failure("lost a peer")
    worker.sentinel.report_failure("again")
    with pytest.raises(CollectiveError, match="lost a peer"):
        worker.sentinel.tick()
    _, failure, first = [worker.said() for _ in range(3)]
    assert failure == messages.GenerationFailure(GENERATION, True, "lost a peer")
    assert isinstance(first, messages.First)
    assert first.generation == GENERATION


def test_times_of_the_first_tick_and_of_commits_are_reported(worker: Worker) -> None:
    began_at = time.monotonic()
    worker.sentinel.formed()
    time.sleep(0.02)
    worker.sentinel.begin_training()
    time.sleep(0.01)
    worker.sentinel.add_commit_time(0.25)
    worker.sentinel.add_commit_time(0.5)
    worker.sentinel.tick()
    while not isinstance(first := worker.said(), messages.First):
        pass
    assert first.sync_s >= 0.02
    assert first.train_s >= 0.01
    assert first.sync_s + first.train_s <= time.monotonic() - began_at
    assert worker.page.commit_s == 0.75
    worker.page.enter(GENERATION + 1)
    assert worker.page.commit_s == 0, "each generation counts anew"


# ---------------------------------------------------------------------------------------------- messages and questions


def test_the_numbers_are_those_of_the_messages() -> None:
    assert {kind.name: kind.value for kind in messages.MessageKind} == _native.Sentinel.MESSAGE_KINDS
    assert {place.name: place.value for place in messages.Place} == _native.Sentinel.PLACES


def test_the_page_says_where_the_worker_is(worker: Worker) -> None:
    sentinel = worker.sentinel
    sentinel.begin_training()
    sentinel.tick()
    sentinel.tick()
    assert worker.page.stamp()[2:] == (messages.Place.TRAIN, GENERATION, 2)
    sentinel.enter(world(GENERATION + 1), GlooContext())
    assert worker.page.stamp()[2:] == (messages.Place.TRAIN, GENERATION + 1, 0)
    sentinel.finish()
    assert worker.page.stamp()[2] == messages.Place.DONE


def test_only_the_first_commit_of_a_generation_is_told(worker: Worker) -> None:
    ids = [CommitId(3, 0), CommitId(3, 4), CommitId(3, 8), CommitId(4, 0), CommitId(4, 1), CommitId(4, 2)]
    for commit in ids:
        worker.sentinel.record_commits(commit, None)
    worker.sentinel.record_commits(None, None)
    worker.hear(messages.Hold(GENERATION))
    said = []
    while not isinstance(message := worker.said(), messages.HoldAnswer):
        said.append(message)
    assert said[1:] == [messages.CommitSealed(CommitId(3, 4)), messages.CommitSealed(CommitId(4, 1))]


def test_an_answer_is_waited_for(worker: Worker) -> None:
    worker.hear(messages.BufferGrown(0, 4096, ""))
    answer = worker.sentinel.request(messages.GrowBuffer(0, 10), messages.BufferGrown)
    assert answer == messages.BufferGrown(0, 4096, "")
    worker.said()
    assert worker.said() == messages.GrowBuffer(0, 10)


def test_an_agent_that_does_not_read_stops_neither_worker_nor_sentinel(worker: Worker) -> None:
    count = 3000  # far more than a socket holds (some hundred)
    for number in range(count):
        worker.sentinel.send(messages.CommitSize(number))
    worker.hear(messages.Hold(GENERATION))
    before = worker.page.stamp()[0]
    deadline = time.monotonic() + LONG_S
    while worker.page.stamp()[0] < before + 3:
        assert time.monotonic() < deadline, "no beat"
        time.sleep(0.01)
    assert worker.said() == messages.Hello(ME, os.getpid(), messages.PROTOCOL_VERSION)
    said = [worker.said() for _ in range(count + 1)]
    assert [m.bytes for m in said if isinstance(m, messages.CommitSize)] == list(range(count))
    assert said[-1] == messages.HoldAnswer(GENERATION, 0, False)


def test_a_message_that_no_socket_takes_is_refused(worker: Worker) -> None:
    with pytest.raises(OSError, match="too long"):
        worker.sentinel._native.send(bytes(64 * 1024 * 1024))
    worker.settle()


@pytest.mark.parametrize(
    ("rubbish", "complaint"),
    [
        (b"short", "no head, only 5 bytes"),
        (messages.MESSAGE_HEAD.pack(99, GENERATION, 0), "unknown kind 99"),
        (bytes(MAX_DATAGRAM_BYTES + 1), "longer than"),
    ],
)
def test_rubbish_is_ignored_with_a_line(
    worker: Worker, rubbish: bytes, complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    worker.agent.send(rubbish)
    worker.settle()
    assert complaint in capfd.readouterr().err
    worker.sentinel.tick()


# ------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("wait", ["tick", "gate", "is_own_error", "ready", "ask"])
def test_ctrl_c_ends_every_wait(worker: Worker, wait: str) -> None:
    worker.hear(messages.Hold(GENERATION))
    worker.answer()
    waits: dict[str, Callable[[], object]] = {
        "tick": worker.sentinel.tick,
        "gate": worker.sentinel.wait_in_gate,
        "is_own_error": lambda: worker.sentinel.is_own_error("error"),
        "ready": lambda: worker.sentinel.ready("h:1"),
        "ask": lambda: worker.sentinel.request(messages.GrowBuffer(0, 1), messages.BufferGrown),
    }
    interrupt = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))

    def wait_until_interrupted() -> None:
        interrupt.start()  # the signal may come before this call has returned
        waits[wait]()

    with pytest.raises(KeyboardInterrupt):
        wait_until_interrupted()
    interrupt.join()
    worker.hear(messages.Hold(GENERATION))  # the sentinel continues as before
    worker.answer()


def test_told_to_leave_in_the_middle_of_a_generation(worker: Worker) -> None:
    def train_until_told_to_leave() -> None:
        worker.hear(messages.Leave(ME))  # the signal may come before this call has returned
        threading.Event().wait(LONG_S)

    worker.sentinel.begin_training()
    with pytest.raises(SystemExit) as caught:
        train_until_told_to_leave()
    assert caught.value.code == 0
    assert worker.sentinel.is_leaving
    assert worker.sentinel.cause == "LEAVE received"
    with pytest.raises(CollectiveError, match="LEAVE received"):
        worker.sentinel.tick()
    with pytest.raises(SystemExit):
        worker.sentinel.ready("h:1")


def test_told_to_leave_while_waiting_for_a_world(worker: Worker) -> None:
    def tell() -> None:
        deadline = time.monotonic() + LONG_S
        while worker.page.stamp()[2] != messages.Place.REGROUP:
            assert time.monotonic() < deadline, "it does not wait for a world"
            time.sleep(0.001)
        worker.hear(messages.Leave(ME))

    told = threading.Thread(target=tell)
    told.start()
    with pytest.raises(SystemExit) as caught:
        worker.sentinel.ready("h:1")
    assert caught.value.code == 0
    told.join()
