"""The measured cost of failures: damaged commits and redone ticks, in the log line, the events and the summary."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from elasticstate.core.ids import CommitId
from tests.kit.job import Job
from tests.kit.pages import page_at

EVERY = 3  # ticks between two commits


def owner(page: Path) -> bytes:
    return page.read_bytes()[64:80]


def sealed(page: Path) -> dict[CommitId, tuple[Path, int]]:
    """Return the commits of a slot: for each its file, and the number of its bytes in that file."""
    found = {}
    for index in (0, 1):
        seal = page_at(page).sealed(index, owner(page))
        if seal is not None:
            found[CommitId(*seal[:2])] = page.with_suffix(f".{index}.safetensors"), seal[3]
    return found


def stop_both(job: Job, generation: int) -> tuple[list[int], list[Path], int]:
    """Stop both workers one tick after a commit: rank 1, then rank 0, which cannot reach the next commit alone."""
    pids = [job.pid_of(rank, generation) for rank in (0, 1)]
    pages = [Path(psutil.Process(pid).environ()["ELASTICSTATE_COMMITS"] + ".control") for pid in pids]
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "rank 1 was never stopped between two commits"
        _, _, _, here, ticks = page_at(pages[1]).stamp()
        if here == generation and ticks > 2 * EVERY and ticks % EVERY == 1:
            os.kill(pids[1], signal.SIGSTOP)
            job.wait_for("a stopped worker", lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED)
            if page_at(pages[1]).stamp()[4] == ticks:
                break
            os.kill(pids[1], signal.SIGCONT)
    newest = CommitId(generation, ticks - 1)
    job.wait_for("the commit of rank 0", lambda: newest in sealed(pages[0]))
    os.kill(pids[0], signal.SIGSTOP)
    job.wait_for("a stopped worker", lambda: psutil.Process(pids[0]).status() == psutil.STATUS_STOPPED)
    assert all(max(sealed(page)) == newest for page in pages)
    return pids, pages, ticks


def damage(pages: list[Path]) -> None:
    """Flip a bit in the last byte of each slot's newest commit."""
    for page in pages:
        path, length = max(sealed(page).items())[1]
        with open(path, "r+b") as file:
            file.seek(length - 1)
            last = file.read(1)[0]
            file.seek(length - 1)
            file.write(bytes([last ^ 1]))


def test_lost_commits_and_redone_ticks_are_counted(tmp_path: Path) -> None:
    with Job(
        tmp_path,
        "-np",
        "2",
        "--join-window",
        "60",
        steps=10,
        step_seconds=0.03,
        commit_every=EVERY,
        until=tmp_path / "stop",
    ) as job:
        job.wait_for_step(7)
        (rank0, rank1), _, _ = stop_both(job, 1)
        os.kill(rank1, signal.SIGKILL)  # kills one worker
        os.kill(rank0, signal.SIGCONT)
        alone = job.wait_for_event("training_resumed", generation=2)
        (rank0, rank1), pages, _ = stop_both(job, 2)
        damage(pages)
        os.kill(rank1, signal.SIGKILL)  # kills one worker; the newest commit of the survivor is damaged as well
        os.kill(rank0, signal.SIGCONT)
        survived = job.wait_for_event("training_resumed", generation=3)
        pids, pages, _ = stop_both(job, 3)
        damage(pages)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # kills both workers
        none = job.wait_for_event("training_resumed", generation=4)
        job.stop_file.touch()
        job.finish()
    changes = (alone, survived, none)
    assert [event["commits_lost"] for event in changes] == [0, 1, 1]
    for event, commits in zip(changes, (0, 1, 1), strict=True):
        assert event["ticks_lost"] - commits * EVERY in (1, 2), "since the commit that was resumed from"
        assert event["lower_bounds"] == []
        lost = "1 commit lost" if commits == 1 else f"{commits} commits lost"
        assert f"; training resumed after {event['downtime_s']:.2f} s, {lost}, {event['ticks_lost']} tick" in job.output
    assert job.output.count("discarded damaged commit") == 4
    (finished,) = job.events("job_finished")
    assert finished["commits_lost"] == 2
    assert finished["ticks_lost"] == sum(event["ticks_lost"] for event in changes)
    assert abs(finished["downtime_s"] - sum(event["downtime_s"] for event in changes)) < 1e-4
    assert f", 2 commits lost, {finished['ticks_lost']} ticks redone, goodput " in job.output.splitlines()[-1]
