"""Durable copies of real jobs: while storage fails in many ways, and after all that the job had in memory is gone."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from elasticstate.durable.stored_copies import MANIFEST, milliseconds_of
from tests.kit.durable_job import FAST, damage, processes_of, saved, wait_for_copies
from tests.kit.job import Job, Line

COMMIT_BYTES = 20_000  # at least, of a copy of train.py


def newest_step(job: Job) -> int:
    return max((int(line["step"]) for line in job.log("commit")), default=0)


def strike(job: Job, kind: str, begin: Callable[[], None], end: Callable[[], None], count: int = 1) -> Line:
    """Let storage fail ``count`` times, while training goes on; then repair it, until a copy is saved."""
    before = len(job.events("durable_copy"))

    def failures() -> list[Line]:
        return [e for e in job.events("durable_copy")[before:] if e["state"] == "failed" and e["kind"] == kind]

    def failure() -> Line | None:
        return failures()[count - 1] if len(failures()) >= count else None

    begin()
    try:
        failed: Line = job.wait_for(f"failure of kind {kind}", failure)
        step = newest_step(job)
        job.wait_for_step(step + 10)
    finally:
        end()
    wait_for_copies(job, 1)
    reasons = {str(event["reason"]) for event in failures()}  # with the names of different copies
    assert sum(map(job.output.count, reasons)) == 1, "failures of one kind are reported once"
    return failed


def replace_by_a_file(place: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    aside = place.with_name("aside")

    def begin() -> None:
        place.rename(aside)
        place.write_text("no directory")

    def end() -> None:
        place.unlink()
        aside.rename(place)

    return begin, end


def suspend_the_uploads(job: Job) -> tuple[Callable[[], None], Callable[[], None]]:
    """Suspend each process that uploads, as a call to a storage does that hangs."""
    agent = psutil.Process(job.events("agent_joined")[-1]["pid"])
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.005):
            for process in agent.children():
                with suppress(psutil.Error):
                    if "elasticstate.durable.upload" in process.cmdline():
                        process.suspend()

    thread = threading.Thread(target=run)

    def end() -> None:
        is_over.set()
        thread.join()

    return thread.start, end


def fill_up(place: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    def begin() -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(place)], check=True)

    return begin, lambda: subprocess.run(["umount", str(place)], check=True) and None


def lose_the_newest_file(place: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    def begin() -> None:
        newest = max(copy for copy in place.iterdir() if (copy / MANIFEST).exists())
        (newest / "part-1.safetensors").unlink()

    return begin, lambda: None


def commits_of(job: Job) -> Path:
    """Return the commit directory of the job's only host."""
    worker = psutil.Process(job.pid_of(0))
    return Path(worker.environ()["ELASTICSTATE_COMMITS"]).parent


def steps_of(job: Job) -> dict[int, str]:
    """Return the weights after each step, by step. Each member has the same, however often it made the step."""
    digests: dict[int, set[str]] = {}
    for line in job.log("step"):
        digests.setdefault(int(line["step"]), set()).add(str(line["digest"]))
    assert all(len(found) == 1 for found in digests.values())
    return {step: found.pop() for step, found in digests.items()}


def test_storage_fails_and_all_memory_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "run"
    options = ("-np", "2", "--durable-dir", str(place), *FAST, "--cooldown-range", "0", "0")
    script = {"step_seconds": 0.02, "digests": True}
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()

    with Job(first, *options, "--job-name", "durable-first", **script, until=tmp_path / "never") as job:
        copies = wait_for_copies(job, 3)
        begun = [milliseconds_of(event["folder"]) or 0 for event in saved(job)]
        assert all(late - early >= 490 for early, late in pairwise(begun)), begun
        assert copies["bytes"] > COMMIT_BYTES
        status = subprocess.run(
            [sys.executable, "-m", "elasticstate", "status", "durable-first"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "durable copies:\n  the newest is" in status.stdout, status
        assert len(list(place.iterdir())) <= 3  # the newest ones, and one that is begun

        assert "Not a directory" in strike(job, "storage", *replace_by_a_file(place), count=3)["reason"]
        assert "--durable-timeout of 1 s" in strike(job, "hung", *suspend_the_uploads(job))["reason"]
        assert "part-1.safetensors is missing" in strike(job, "lost", *lose_the_newest_file(place))["reason"]
        if os.geteuid() == 0:
            assert "No space left" in strike(job, "full", *fill_up(place), count=2)["reason"]
        assert not job.events("end"), "no failure of the storage has ended a generation"

        # All processes of the only host die, and its memory is gone; the driver lives.
        commits, agent = commits_of(job), job.events("agent_joined")[-1]["pid"]
        wait_for_copies(job, 1)
        os.kill(agent, signal.SIGSTOP)
        shutil.rmtree(commits)
        os.kill(agent, signal.SIGKILL)
        job.wait_for_event("agent_lost")
        job.wait_for("another world", lambda: any(line["generation"] == 2 for line in job.log("commit")))
        assert "the job resumes from the newest durable copy" in job.output
        entered = [line for line in job.log("enter") if line["generation"] == 2]
        assert {line["step"] for line in entered} & {int(step) for step in steps_of(job)}
        wait_for_copies(job, 2)

        # All processes die, the driver, too, and the memory is gone.
        commits, doomed = commits_of(job), processes_of(job)
        for process in doomed:
            process.suspend()
        shutil.rmtree(commits)
        for process in doomed:
            process.kill()
        psutil.wait_procs(doomed[1:], 30)
        assert job.process.wait() == -signal.SIGKILL
        before = steps_of(job)
    for leftover in Path(os.environ["XDG_RUNTIME_DIR"]).glob("elasticstate-*-durable-first"):
        shutil.rmtree(leftover, ignore_errors=True)

    newest = max(copy for copy in place.iterdir() if (copy / MANIFEST).exists())
    damage(newest / "part-1.safetensors")
    last = max(before) + 20
    with Job(second, *options, **script, steps=last) as job:
        job.finish()
        assert f"durable copy {newest.name} cannot be used" in job.output
        begun = {line["step"] for line in job.log("enter")}
        assert len(begun) == 1
        assert 0 < min(begun) < max(before)
        after = steps_of(job)
        again = before.keys() & after.keys()
        assert again
        assert {step: before[step] for step in again} == {step: after[step] for step in again}
        assert max(after) == last
        assert saved(job)[-1]["time"] > job.log("gate")[-1]["time"], "the last commit is saved at the end of the job"

    with Job(third, *options, "-np", "3", **script, steps=last) as job:
        job.finish()
        assert {(line["step"], line["digest"]) for line in job.log("final")} == {(last, after[last])}
        assert len(job.log("final")) == 3
    out = tmp_path / "all.safetensors"
    command = [sys.executable, "-m", "elasticstate", "export", str(place), "-o", str(out)]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert digest(load_file(out)) == after[last]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return what train.py calls the digest of its model and optimizer."""
    names = [f"model.parameters.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    names += [f"optimizer.state.{number}.momentum_buffer" for number in range(4)]
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in names)).hexdigest()


def test_a_job_never_begins_anew_because_its_copies_cannot_be_read(tmp_path: Path) -> None:
    place = tmp_path / "run"
    options = ("-np", "1", "--durable-dir", str(place), "--reset-limit", "0")
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    with Job(first, *options, steps=5) as job:
        job.finish()
        assert len(saved(job)) == 1  # at the end
    with Job(second, *options, steps=5) as job:
        job.finish()
        assert [line["step"] for line in job.log("enter")] == [5]
    for copy in place.iterdir():
        damage(copy / "part-1.head")
    with Job(third, *options, steps=5) as job:
        job.finish(status=3)
        assert "all copies are damaged" in job.output
        assert not job.log("enter")


def test_an_object_store(tmp_path: Path, object_store: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = ("-np", "1", "--durable-dir", object_store, "--durable-interval", "1", "--durable-keep", "2")
    for folder in (first, second):
        folder.mkdir()
    with Job(first, *options, until=tmp_path / "stop", steps=5, step_seconds=0.05) as job:
        wait_for_copies(job, 3)
        (tmp_path / "stop").touch()
        job.finish()
        last = int(job.log("final")[0]["step"])
    with Job(second, *options, steps=last) as job:
        job.finish()
        assert [line["step"] for line in job.log("enter")] == [last]
    out = tmp_path / "model.safetensors"
    done = subprocess.run(
        [sys.executable, "-m", "elasticstate", "export", object_store, "-o", str(out), "--value", "model"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "4 tensors" in done.stdout
