"""Jobs with --one-copy-per-host: one worker of each host keeps commits, and no fault loses a committed step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.kit.job import SCRIPTS, Hosts, Job, Line
from tests.kit.series import Series, faults_file, kill

MEGABYTES = 8
FAST = ("--join-window", "30", "--min-interrupt-distance", "0.5")


def buffers(job: Job, host: str = "localhost") -> dict[str, int]:
    """Return the allocated bytes of each commit buffer of a host."""
    (started,) = {event["job"] for event in job.events("job_started")}
    paths = []
    for directory in Path("/dev/shm").glob(f"elasticstate-{os.getuid()}-*-{host}"):
        with contextlib.suppress(FileNotFoundError):  # that of another job, which has just ended
            paths += [path for path in directory.glob("*.safetensors") if _is_of(path, job)]
    assert paths, f"no commit directory of {started} on {host}"
    return {path.name: path.stat().st_blocks * 512 for path in sorted(paths)}


def _is_of(path: Path, job: Job) -> bool:
    """Return True if a worker of this job has mapped or opened the file's page."""
    page = path.with_name(f"{path.name.split('.')[0]}.control")
    pids = {line["pid"] for line in job.log("enter")}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        if str(page.parent) in text:
            return True
    return False


def entered(job: Job, generation: int) -> list[Line]:
    return [line for line in job.log("enter") if line["generation"] == generation]


def pids(job: Job, generation: int, follow: bool) -> list[int]:
    """Return the followers of a world, or its keepers."""
    return [int(line["pid"]) for line in entered(job, generation) if (line["follows"] is not None) == follow]


def strike(series: Series, victims: list[int]) -> None:
    recovery = series.strike(deaths=len(victims), act=lambda: [kill(pid) for pid in victims])
    assert {exited["signal"] for exited in recovery.exits} == {signal.SIGKILL}
    assert recovery.resumed[0]["ticks_lost"] <= 1
    assert recovery.resumed[0]["commits_lost"] == 0


def test_a_host_has_the_commits_of_one_worker_and_every_death_is_survived(tmp_path: Path) -> None:
    options = ("-np", "4", "--one-copy-per-host", *FAST)
    faults = {"faults_file": faults_file(tmp_path)}
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", ballast=MEGABYTES, **faults) as job:
        series = Series(job, 4)
        now = series.wait_until_whole()
        job.wait_for_step(5)
        found = buffers(job)
        assert len(pids(job, now, follow=False)) == 1
        assert [name for name, size in found.items() if size] == ["0.0.safetensors", "0.1.safetensors"], found
        assert 2 * MEGABYTES << 20 <= sum(found.values()) <= (2 * MEGABYTES << 20) * 1.2, found
        strike(series, pids(job, now, follow=True)[:1])
        for victims in ("keeper", "keeper and follower", "followers", "all"):
            now = series.wait_until_whole()
            keeper, followers = pids(job, now, follow=False), pids(job, now, follow=True)
            assert (len(keeper), len(followers)) == (1, 3)
            chosen = {"keeper": keeper, "keeper and follower": [*keeper, followers[0]], "followers": followers}
            strike(series, chosen.get(victims, [*keeper, *followers]))
        assert buffers(job).keys() == found.keys()
        assert sum(buffers(job).values()) == sum(found.values()), "the restarted workers use the same buffers"
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


def test_keepers_of_two_hosts_stand_in_for_each_other(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2", "127.0.0.2:2")
    options = ("-np", "4", "--one-copy-per-host", *hosts.options, *FAST)
    faults = {"faults_file": faults_file(tmp_path)}
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", ballast=MEGABYTES, **faults) as job:
        series = Series(job, 4)
        now = series.wait_until_whole()
        assert [line["follows"] for line in sorted(entered(job, now), key=lambda line: int(line["rank"]))] == [
            *(None, 0, None, 0)
        ]
        for victims in ("keeper", "both keepers", "follower", "all"):
            now = series.wait_until_whole()
            keepers, followers = pids(job, now, follow=False), pids(job, now, follow=True)
            assert (len(keepers), len(followers)) == (2, 2)
            chosen = {"keeper": keepers[:1], "both keepers": keepers, "follower": followers[:1]}
            strike(series, chosen.get(victims, [*keepers, *followers]))
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()


def test_a_keeper_that_drains_hands_its_commits_over(tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", "--one-copy-per-host", *FAST)
    with Job(tmp_path, *options, steps=20, until=tmp_path / "stop", ballast=MEGABYTES) as job:
        job.wait_for_step(10)
        (keeper,) = pids(job, 1, follow=False)
        os.kill(keeper, signal.SIGTERM)
        job.wait_for_event("worker_exited", exit_code=0, pid=keeper)
        newest = max(int(line["generation"]) for line in job.log("enter"))
        job.wait_for("a keeper that stays", lambda: [p for p in pids(job, newest, follow=False) if p != keeper])
        job.stop_file.touch()
        job.finish(0)
        job.check_survival()
        reached = max(int(line["step"]) for line in job.log("commit") if line["generation"] == 1)
        assert {line["step"] >= reached for line in entered(job, 2)} == {True}, "a drain loses nothing"


@pytest.mark.parametrize("options", [["--one-copy-per-host"], []], ids=str)
def test_values_that_differ_by_rank_end_a_job_with_followers(options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "one_copy_guard.py")]
    with Job(tmp_path, "-np", "2", *options, command=command) as job:
        job.finish(status=3 if options else 0)
    (error,) = [str(event["error"]) for event in job.events("root_cause")] or [""]
    assert ("seen: rank 0 | rank 1." in error) == bool(options), error
    assert ("has trained" in job.output) != bool(options)
