"""Commits outlive their workers: all workers die in many ways, and the job resumes without any change of weights."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.kit.job import Job
from tests.kit.series import Errors, Recovery, Series, faults_file, one_after_the_other

FIXED = ("--join-window", "60")  # the world size is fixed: the first world waits for all workers


def processes(job: Job, generation: int = 1, size: int = 2) -> list[int]:
    """Wait until all workers of a generation train. Return their process ids."""

    def entered() -> list[int]:
        pids = [line["pid"] for line in job.log("enter") if line["generation"] == generation]
        return pids if len(pids) == size else []

    pids: list[int] = job.wait_for(f"generation {generation}", entered)
    return pids


def kill_at_once(pids: list[int]) -> None:
    """Kill all within microseconds, unless the test process is descheduled. The caller checks that each was killed."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def memory_of(job: Job) -> Path:
    """Return the commit directory of the job's only host."""
    worker = psutil.Process(processes(job)[0])
    return Path(worker.environ()["ELASTICSTATE_COMMITS"]).parent


def resumed_from(job: Job, generation: int) -> set[int]:
    """Return the steps at which the workers of a generation have begun."""
    return {line["step"] for line in job.log("enter") if line["generation"] == generation}


# ------------------------------------------------------------------------------ deaths one after the other at one job


def check(series: Series, recovery: Recovery) -> None:
    """Check that both workers have resumed in one new world, from the last commit or the one before.

    The last commit may be one later than the last line of the log: a worker may die between the two.
    """
    assert [world["size"] for world in recovery.worlds] == [2]
    committed = max(line["step"] for line in series.job.log("commit") if line["generation"] == recovery.generation)
    assert resumed_from(series.job, recovery.worlds[0]["generation"]) <= {committed - 1, committed, committed + 1}


def all_are_killed_ten_times(series: Series) -> None:
    for _ in range(10):
        pids = processes(series.job, series.wait_until_whole())
        recovery = series.strike(deaths=2, act=lambda pids=pids: kill_at_once(pids))
        assert [event["signal"] for event in recovery.exits] == [signal.SIGKILL] * 2
        check(series, recovery)


def all_end(series: Series, fault: str, number: int) -> None:
    series.wait_until_whole()
    # In one step, and none that a worker may reach before it has read of the fault: the other would never make it.
    step = max(line["step"] for line in series.job.log("commit")) + 20
    faults = [f"{fault}@{step}:rank={rank}:generation={{now}}" for rank in (0, 1)]
    recovery = series.strike(*faults, deaths=2)
    assert [event["signal"] for event in recovery.exits] == [number] * 2
    check(series, recovery)


def one_is_killed(series: Series) -> None:
    recovery = series.strike("kill@step:rank=1:generation={now}", deaths=1)
    check(series, recovery)


def the_agent_is_killed(series: Series) -> None:
    job, before = series.job, series.wait_until_whole()
    os.kill(job.events("agent_joined")[-1]["pid"], signal.SIGKILL)
    job.wait_for_event("agent_lost")
    job.wait_for("another world", lambda: job.events("world_formed")[-1]["generation"] > before)
    after = series.wait_until_whole()
    assert after == before + 1
    committed = max(line["step"] for line in job.log("commit") if line["generation"] == before)
    assert min(resumed_from(job, after)) >= committed - 1
    assert len(job.events("agent_lost")) == 1


STRIKES: dict[str, Callable[[Series], None]] = {
    "all are killed, ten times": all_are_killed_ten_times,
    "all end by SIGSEGV": lambda series: all_end(series, "segv", signal.SIGSEGV),
    "all end by SIGABRT": lambda series: all_end(series, "abort", signal.SIGABRT),
    "all are out of memory": lambda series: all_end(series, "oom", signal.SIGKILL),
    "one is killed": one_is_killed,
    "the agent is killed": the_agent_is_killed,
}


@pytest.fixture(scope="module")
def oom_group() -> Iterator[Path | None]:
    """Memory cgroup with a limit of 64 MB, too small for the workers. None if no such group can be made here.

    The workers find it in the variable OOM_GROUP.
    """
    base = Path("/sys/fs/cgroup/memory")
    group = base / f"elasticstate-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError:
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OOM_GROUP", str(group))
        yield group
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()


@dataclass
class Struck:
    """The job at which all deaths have struck."""

    job: Job
    errors: Errors
    worlds: dict[str, range]  # generations that each death has begun


@pytest.fixture(scope="module")
def struck(runtime_directory: Path, tmp_path_factory: pytest.TempPathFactory, oom_group: Path | None) -> Struck:
    """Let all deaths strike at one job of two workers, and let the job finish."""
    folder = tmp_path_factory.mktemp("series")
    script = {"steps": 5, "step_seconds": 0.02, "until": folder / "stop", "digests": True}
    options = ("-np", "2", *FIXED, "--cooldown-range", "0", "0")
    worlds = {}
    with Job(folder, *options, **script, faults_file=faults_file(folder)) as job:
        series = Series(job, 2)

        def one(fault: str) -> None:
            before = series.wait_until_whole()
            STRIKES[fault](series)
            worlds[fault] = range(before + 1, series.wait_until_whole() + 1)

        possible = [fault for fault in STRIKES if oom_group or fault != "all are out of memory"]
        errors = one_after_the_other(possible, one)
        job.stop_file.touch()
        if not any(errors.values()):
            job.finish()
    return Struck(job, errors, worlds)


@pytest.fixture(scope="module")
def undisturbed(struck: Struck, tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """Return the weights after each step of an undisturbed job that trains as long."""
    steps = max((line["step"] for line in struck.job.log("commit")), default=1)
    with Job(tmp_path_factory.mktemp("undisturbed"), "-np", "2", steps=steps, step_seconds=0, digests=True) as job:
        job.finish()
        return weights(job)


def weights(job: Job, generations: Container[int] = range(1, 100)) -> dict[int, set[str]]:
    """Return the weights of all ranks by step, at the begin of these worlds, after each step, and at the end."""
    found: dict[int, set[str]] = {}
    for line in job.log():
        if line["what"] in ("enter", "step", "final") and line["generation"] in generations:
            found.setdefault(line["step"], set()).add(line["digest"])
    return found


@pytest.mark.parametrize("fault", STRIKES)
def test_the_weights_are_those_of_an_undisturbed_run(
    struck: Struck, undisturbed: dict[int, set[str]], oom_group: Path | None, fault: str
) -> None:
    if fault == "all are out of memory" and oom_group is None:
        pytest.skip("no memory cgroup can be made here")
    struck.errors.check(fault)
    found = weights(struck.job, struck.worlds[fault])
    assert found
    assert found == {step: undisturbed[step] for step in found}
    assert all(len(digests) == 1 for digests in found.values())


# ---------------------------------------------------------------------------------------------------- jobs of their own


def give_to_another_job(job: Job) -> None:
    """Kill all workers of a job, and change the owner of their commits before the workers are started again."""
    agent = job.events("agent_joined")[0]["pid"]
    pids, memory = processes(job, size=1), memory_of_one(job)
    os.kill(agent, signal.SIGSTOP)
    kill_at_once(pids)
    for path in list(memory.iterdir()):
        if path.suffix == ".control":
            page = bytearray(path.read_bytes())
            other = page.replace(_owner_in(page), os.urandom(16))
            path.write_bytes(other)
    os.kill(agent, signal.SIGCONT)


def memory_of_one(job: Job) -> Path:
    worker = psutil.Process(processes(job, size=1)[0])
    return Path(worker.environ()["ELASTICSTATE_COMMITS"]).parent


def _owner_in(page: bytearray) -> bytes:
    return bytes(page[64:80])


def test_commits_that_are_not_ours_are_not_claimed(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "1", steps=500, step_seconds=0.02) as job:
        job.wait_for_step(10)
        give_to_another_job(job)
        job.finish(status=1)
    assert "StateLostError: no host holds a commit any more" in job.events("root_cause")[0]["reason"]
    assert "was killed by SIGKILL" in job.events("root_cause")[0]["reason"], "the first failure is named"
    assert len(job.log("enter")) == 1, "nobody has trained from anything else"


def test_a_commit_of_another_layout_is_not_claimed(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "1", steps=60, misfit=True, fault=["kill@30:rank=0"]) as job:
        job.finish(status=3)
    cause = job.events("root_cause")[0]
    assert "the newest commit does not fit the objects of a new process" in cause["reason"]
    assert re.search(r"StateMisfitError: commit \(1, \d+\) is whole, but cannot be loaded", cause["error"])
    assert len(job.log("enter")) == 1


# ----------------------------------------------------------------------------------- commit storage, and stale files


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 24 MB."""
    path = tmp_path / "small"
    path.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_commit_directory_that_is_too_small_is_a_clear_error(small: Path, tmp_path: Path) -> None:
    options = ("-np", "2", "--reset-limit", "0", "--commit-dir", str(small))
    with Job(tmp_path, *options, steps=5, ballast=8) as job:
        job.finish(status=3)
    error = job.events("root_cause")[0]["error"]
    assert f"CommitStorageError: commits do not fit into --commit-dir {small} of host localhost" in error
    assert "for each of 2), and 2" in error
    assert "docker run --shm-size" in error
    assert not [event for event in job.events("worker_exited") if event["signal"] is not None], "never SIGBUS"
    assert not list(small.iterdir())


def test_commits_that_fit_are_kept_there_and_removed_at_the_end(small: Path, tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "2", "--commit-dir", str(small), steps=60, ballast=4, fault=["kill@30:rank=0"]) as job:
        job.wait_for_step(1)
        assert memory_of(job).parent == small
        job.finish()
    assert "commits need 17.8 MB on this host (2 workers x 2 x 4.5 MB); 25.2 MB are free" in job.output
    assert not list(small.iterdir())


def test_what_a_dead_job_has_left_is_kept_for_a_while_and_then_removed_by_another_one(tmp_path: Path) -> None:
    for name in ("living", "dead", "later"):
        (tmp_path / name).mkdir()
    stop = tmp_path / "stop"
    decoy = Path(f"/dev/shm/elasticstate-{os.getuid()}-zzz-{uuid.uuid4().hex}")  # the scan checks this name last
    with (
        Job(tmp_path / "living", "-np", "1", until=stop, steps=10) as living,
        Job(tmp_path / "dead", "-np", "1", steps=10_000) as dead,
    ):
        kept, left = (memory_of_one(job) for job in (living, dead))
        agent = dead.events("agent_joined")[0]["pid"]
        # else the agent would detect that its driver is gone, and remove the directory itself
        os.kill(agent, signal.SIGSTOP)
        dead.process.kill()
        dead.process.wait()
        os.kill(agent, signal.SIGKILL)
        decoy.mkdir(mode=0o700)
        with Job(tmp_path / "later", "-np", "1", "--driver-timeout", "10", until=stop, steps=10) as later:
            later.wait_for("a look for leftovers", lambda: not decoy.exists())
            assert left.exists()
            os.utime(left / "job", (0, 0))  # its --driver-timeout has passed
            later.wait_for("the removal", lambda: not left.exists())
            assert kept.exists()
            stop.touch()
            later.finish()
        living.finish()
    assert not kept.exists()


def test_the_driver_removes_what_an_agent_killed_in_the_end_has_left(tmp_path: Path) -> None:
    with Job(tmp_path, "-np", "1", steps=10_000) as job:
        memory = memory_of_one(job)
        agent = job.events("agent_joined")[0]["pid"]
        os.kill(agent, signal.SIGSTOP)
        job.process.send_signal(signal.SIGINT)
        job.wait_for("the end's begin", lambda: "SIGINT: stopping the workers" in job.output)
        assert memory.exists()
        os.kill(agent, signal.SIGKILL)
        job.finish(status=130)
    assert not memory.exists()
