"""Failure detection of workers by the stamps on their pages. The clock is an argument."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elasticstate import _native
from elasticstate.agent.supervisor import Liveness, stamps_interval_s
from elasticstate.core.ids import CommitId
from elasticstate.net.messages import Place, Stamp
from tests.kit.pages import page_at

OWNER = b"o" * 16


class Worker:
    """The worker's side of the page, and the agent's liveness check of it."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(4096))
        self.page = page_at(path)
        self.page.enter(7)  # the stamp of an earlier process
        self.liveness = Liveness(page_at(path), OWNER)
        self.liveness.look(0.0)
        self.liveness.begin(0.0)
        self.page.enter(1)

    def heartbeat(self, now: float, place: Place = Place.TRAIN, ticks: int = 0, progress: bool = False) -> None:
        self.page.heartbeat()
        self.page.set_place(place)
        for _ in range(ticks):
            self.page.word.add_tick()
        if progress:
            self.page.progress()
        self.liveness.look(now)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path / "control")


def test_a_worker_that_beats_is_well(worker: Worker) -> None:
    worker.heartbeat(9.0)
    assert worker.liveness.verdict(18.0, 10.0) == ""


def test_a_silent_worker_is_given_up_after_the_heartbeat_timeout_and_once(worker: Worker) -> None:
    worker.liveness.look(10.1)
    assert worker.liveness.verdict(10.0, 10.0) == ""
    assert worker.liveness.verdict(10.1, 10.0) == "no heartbeat for --heartbeat-timeout of 10 s"
    worker.liveness.end()
    assert worker.liveness.verdict(10.1, 10.0) == ""


def test_time_in_which_the_agent_itself_stood_still_does_not_count(worker: Worker) -> None:
    worker.liveness.forgive(5.0)
    assert worker.liveness.verdict(14.9, 10.0) == ""
    assert worker.liveness.verdict(15.1, 10.0)


def test_a_worker_that_beats_without_ticks_hangs(worker: Worker) -> None:
    for now in range(1, 8):
        worker.heartbeat(float(now), ticks=now <= 2)
    assert worker.liveness.verdict(7.0, 10.0) == ""
    assert worker.liveness.doubt(9.0, None) == ""
    assert worker.liveness.doubt(7.0, 5.0) == ""
    assert worker.liveness.doubt(7.1, 5.0) == "no tick for --hang-timeout of 5 s"


def test_a_worker_that_says_it_gets_on_does_not_hang(worker: Worker) -> None:
    for now in range(1, 8):
        worker.heartbeat(float(now), progress=now <= 4)
    assert worker.liveness.doubt(9.0, 5.0) == ""
    assert worker.liveness.doubt(9.1, 5.0)


def test_a_worker_that_waits_for_its_agent_does_not_hang(worker: Worker) -> None:
    worker.heartbeat(1.0)
    worker.liveness.move(4.0)
    assert worker.liveness.doubt(9.0, 5.0) == ""
    assert worker.liveness.doubt(9.1, 5.0)


def test_only_training_can_hang(worker: Worker) -> None:
    for place in (Place.BOOT, Place.REGROUP, Place.GATE):
        worker.heartbeat(0.0, place)
        for now in range(20):
            worker.heartbeat(float(now), place)
        assert worker.liveness.doubt(19.5, 5.0) == ""


def test_behind_the_gate_nobody_is_judged(worker: Worker) -> None:
    worker.heartbeat(1.0, Place.DONE)
    assert worker.liveness.verdict(1000.0, 10.0) == worker.liveness.doubt(1000.0, 5.0) == ""


def test_rubbish_on_the_page_is_no_place(worker: Worker) -> None:
    worker.page.set_place(99)
    worker.heartbeat(1.0, place=99)  # type: ignore[arg-type]
    assert worker.liveness.verdict(20.0, 10.0) == "no heartbeat for --heartbeat-timeout of 10 s"


def test_news_are_signs_of_life_and_commits_and_each_is_told_once(worker: Worker) -> None:
    worker.liveness.changed_stamp()
    assert worker.liveness.changed_stamp() is None
    worker.heartbeat(1.0, ticks=2)
    assert worker.liveness.changed_stamp() == Stamp(Place.TRAIN, 1, 2, None)
    assert worker.liveness.changed_stamp() is None
    worker.page.seal(1, OWNER, 1, 3, 0, 0, 0)
    assert worker.liveness.changed_stamp() == Stamp(Place.TRAIN, 1, 2, CommitId(1, 3))
    worker.page.seal(0, b"x" * 16, 1, 4, 0, 0, 0)
    assert worker.liveness.changed_stamp() is None, "a seal of another owner is none"


def test_points_of_the_present_generation_are_reported_once(worker: Worker) -> None:
    worker.page.add_point(1, 5, 100)
    worker.page.add_point(1, 6, 250)
    worker.heartbeat(1.0, ticks=6)
    assert worker.liveness.changed_stamp() == Stamp(Place.TRAIN, 1, 6, None, pace=((5, 100), (6, 250)))
    worker.page.add_point(1, 7, 300)
    worker.page.enter(2)
    worker.page.add_point(2, 5, 40)
    worker.heartbeat(2.0)
    assert worker.liveness.changed_stamp() == Stamp(Place.TRAIN, 2, 0, None, pace=((5, 40),))


def test_a_stamp_says_for_how_long_the_worker_has_made_no_progress(worker: Worker) -> None:
    def still_s() -> float | None:
        stamp = worker.liveness.changed_stamp()
        return None if stamp is None else stamp.still_s

    worker.heartbeat(1.0, ticks=1)
    assert still_s() == 0.0
    worker.heartbeat(5.0)
    assert still_s() == 4.0
    worker.liveness.look(6.0)
    assert still_s() is None, "no heartbeat: a stamp would be a sign of life"
    worker.heartbeat(7.0, progress=True)
    assert still_s() == 0.0


def test_a_stamp_says_for_how_long_the_worker_has_trained_in_its_generation(worker: Worker) -> None:
    def trained_s() -> float:
        stamp = worker.liveness.changed_stamp()
        assert stamp is not None
        return stamp.trained_s

    worker.heartbeat(1.0)
    assert trained_s() == 0.0
    worker.page.begin_training(1_200_000_000)
    worker.heartbeat(2.0)
    assert trained_s() == 0.8
    worker.heartbeat(5.0, Place.REGROUP, progress=True)
    assert trained_s() == 3.8, "since it began, whatever it does now"
    worker.page.enter(2)
    worker.heartbeat(6.0)
    assert trained_s() == 0.0


def test_stamps_are_sent_each_second_less_often_in_a_large_world_and_several_times_within_the_timeout() -> None:
    assert stamps_interval_s(10.0, 0) == stamps_interval_s(10.0, 4000) == stamps_interval_s(60.0, 8) == 1.0
    assert stamps_interval_s(10.0, 6000) == 1.5
    assert stamps_interval_s(10.0, 100_000) == 2.5
    assert stamps_interval_s(2.0, 8) == 0.2
    assert stamps_interval_s(2.0, 100_000) == 0.5


def test_a_lease_also_holds_for_the_new_page_of_a_worker_that_boots(tmp_path: Path) -> None:
    """Its files were deleted before its Hello, so it gets others."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(bytes(4096))
    new.write_bytes(bytes(4096))
    liveness = Liveness(page_at(old), OWNER)
    liveness.set_lease(1)  # a time that has passed
    liveness.storage_is(page_at(new))
    ours, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agents:
        assert not _native.Sentinel(page_at(new), ours.detach()).in_lease()
